"""One generation from arrival to end: its tokens, its place in the cache, its counters.

tokens   [0, num_prompt)            the prompt
         [num_prompt, len)          committed output
cache    [0, num_proven)            finite for sure: logits that saw them were; may be shared
         [num_proven, num_computed) computed, not yet seen by any logits
         [num_computed, blocks end) ours alone: drafted or not yet written
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cache.blocks import hash_block
from ..grammar.state import GrammarState
from ..params import SamplingParams
from ..sampling import TokenCounts, TokenRules
from ..text import IncrementalDetokenizer
from ..types import DraftRequest, FinishReason, TokenLogprob, TokenView
from .stats import Counters, RequestStats

__all__ = ["Request"]


@dataclass(slots=True, eq=False)
class Request:
    """The mutable state of a generation. Only the scheduler writes it."""

    request_id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int  # the one that noise is keyed by: the request's own, or a fresh one
    stop_ids: frozenset[int]  # end-of-text (unless ignored) and the request's stop tokens
    max_tokens: int  # output tokens, already cut to what the context holds
    detokenizer: IncrementalDetokenizer
    arrival_s: float
    rules: TokenRules = field(default_factory=TokenRules)
    counts: TokenCounts | None = None  # of the output, for requests with penalties
    sample_index: int = 0  # which of its prompt's samples it is
    echo: str = ""  # the prompt's text, if the answer is to begin with it
    grammar: GrammarState | None = None  # what the output must look like, as far as it has come
    grammar_error: Exception | None = None  # why the grammar could not go on
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of prompt tokens 1, 2, ...
    num_computed: int = 0
    num_proven: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of full blocks of tokens, as far as known
    num_published: int = 0
    # Where bits count, prompt positions [0, num_bulk) are computed in bulk; None: makes no odds
    num_bulk: int | None = None
    drafting: bool = True  # false after its drafter failed
    finish_reason: FinishReason | None = None
    counters: Counters = field(default_factory=Counters)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether its tokens are the likeliest that its grammar allows, and no more is asked."""
        return self.params.temperature == 0 and self.params.logprobs is None and self.rules.is_empty

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are still to be computed; at least 1 while it runs."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Output tokens that it may still get."""
        return self.max_tokens - self.num_output

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be said."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.num_prompt - 1

    def append(self, tokens: Sequence[int]) -> None:
        """Take committed output in."""
        self.tokens.extend(tokens)
        if self.counts is not None:
            self.counts.append(tokens)

    def block_hashes(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Hash the first `num_blocks` full blocks of tokens; each is hashed once."""
        for index in range(len(self.hashes), num_blocks):
            # Whoever has another salt finds nothing of ours, nor learns by timing what we asked.
            parent = self.hashes[-1] if self.hashes else self.params.cache_salt.encode()
            chunk: Sequence[int] = self.tokens[index * block_size : (index + 1) * block_size]
            assert len(chunk) == block_size, "only full blocks of committed tokens are hashed"
            self.hashes.append(hash_block(parent + self._kind(index, block_size), chunk))
        return self.hashes[:num_blocks]

    def _kind(self, index: int, block_size: int) -> bytes:
        """Tell blocks apart whose tokens are the same and whose bits are not."""
        if self.num_bulk is None:
            return b""
        num_fine = min(block_size, max(0, (index + 1) * block_size - self.num_bulk))
        return b"" if num_fine == 0 else b"fine %d" % num_fine

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may branch: what looks at the history of each row knows one path only."""
        return self.grammar is None and self.rules.is_empty and self.params.logprobs is None

    def draft_view(
        self,
        max_draft: int,
        row_cost: float = 0.0,
        pass_s: float = 0.0,
        forced: tuple[int, ...] = (),
    ) -> DraftRequest:
        """Show a drafter what it may see. Tokens and blocks are not copied: O(1) per step."""
        allowed = max_draft if self.drafting else 0
        return DraftRequest(
            request_id=self.request_id,
            tokens=TokenView(self.tokens),
            max_draft=allowed,
            row_cost=row_cost,
            pass_s=pass_s,
            takes_trees=self.takes_trees,
            params=self.params,
            seed=self.seed,
            forced=forced if allowed else (),
            blocks=TokenView(self.blocks),
        )

    def snapshot(self, now_s: float) -> RequestStats:
        """Freeze the counters."""
        counts = self.counters
        first = self.first_token_s if self.first_token_s is not None else now_s
        last = self.last_token_s if self.last_token_s is not None else now_s
        started = self.scheduled_s if self.scheduled_s is not None else now_s
        return RequestStats(
            num_prompt_tokens=self.num_prompt,
            num_steps=counts.num_steps,
            num_drafts=counts.num_drafts,
            num_drafted=counts.num_drafted,
            num_accepted=counts.num_accepted,
            num_emitted=counts.num_emitted,
            offered_by_position=tuple(counts.offered_by_position),
            accepted_by_position=tuple(counts.accepted_by_position),
            num_cached_tokens=counts.num_cached_tokens,
            num_preemptions=counts.num_preemptions,
            drafter_faults=dict(counts.drafter_faults),
            queue_s=started - self.arrival_s,
            ttft_s=first - self.arrival_s,
            e2e_s=last - self.arrival_s,
            draft_s=counts.draft_s,
            verify_s=counts.verify_s,
            host_s=counts.host_s,
        )
