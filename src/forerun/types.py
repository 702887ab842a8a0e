"""What crosses from one part of the engine to another. Frozen, complete at birth.

Dimension letters: B requests, K draft tokens, N flattened tokens of a step, M rows of logits,
V vocabulary, E hidden size, D depth of a tree. Nothing here computes anything but properties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import overload

import torch
from torch import Tensor

from .params import SamplingParams

__all__ = [
    "DraftRequest",
    "FeatureSpan",
    "FeatureSpec",
    "Features",
    "FinishReason",
    "ForwardInput",
    "HiddenStates",
    "Outcome",
    "Proposal",
    "RequestOutcome",
    "TokenEvent",
    "TokenLogprob",
    "TokenView",
    "TreeRows",
]


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-text, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # its owner asked
    ERROR = "error"  # see the event's error


class TokenView(Sequence[int]):
    """A request's tokens to read and not to write: O(1) to make, slices are copies."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter may know of a request when it guesses."""

    request_id: int
    tokens: Sequence[int]  # prompt and committed output; grows between steps, never shrinks
    max_draft: int  # most tokens that this step can use
    row_cost: float = 0.0  # what one more row adds to a pass, in passes over one row: 0 is free
    pass_s: float = 0.0  # seconds of a pass over one row, as measured at start; 0: not measured
    takes_trees: bool = False  # whether this step can verify several paths
    params: SamplingParams = field(default_factory=SamplingParams)  # what the target is asked for
    seed: int = 0  # of its noise
    forced: tuple[int, ...] = ()  # what a grammar lets nothing but follow
    # The target's cache blocks, enough for `tokens` and the draft: where a drafter that keeps one
    # entry for each position may keep it beside the target's, shared prefixes included.
    blocks: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """Which hidden states of the target a drafter reads."""

    layers: tuple[int, ...] = ()  # the residual stream after so many layers; 0: the embeddings
    final: bool = False  # what the vocabulary projection reads: after the final norm

    def union(self, other: FeatureSpec) -> FeatureSpec:
        """Name what either of two drafters reads."""
        layers = tuple(sorted({*self.layers, *other.layers}))
        return FeatureSpec(layers, self.final or other.final)


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What a pass leaves of its rows for drafters, in the target's format."""

    layers: Mapping[int, Tensor]  # [N, E] each, by the layers of the spec
    final: Tensor | None  # [N, E]


@dataclass(frozen=True, slots=True)
class FeatureSpan:
    """Consecutive positions of one request whose hidden states a step computed, and that stand."""

    request_id: int
    first: int  # the position of the first of `rows`
    rows: Tensor  # [n] int64, rows of the hidden states
    blocks: Sequence[int] = ()  # see `DraftRequest.blocks`


@dataclass(frozen=True, slots=True)
class Features:
    """A step's hidden states and whose they are: prompts' and accepted drafts' alike."""

    states: HiddenStates
    spans: tuple[FeatureSpan, ...]

    def of(self, wanted: Callable[[int], bool]) -> Features | None:
        """Keep the spans of requests that are wanted; None: there are none."""
        spans = tuple(each for each in self.spans if wanted(each.request_id))
        return Features(self.states, spans) if spans else None


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of a batch, their lengths and, if they were sampled, probabilities."""

    tokens: Tensor  # [B, K] int64, right-padded with 0
    lengths: Tensor  # [B] int64, 0 <= length <= K
    # [B, K, V] float32 after filters; None: all drafts are deterministic. Zeros in a request's
    # first row: its own draft is, or it has none.
    probs: Tensor | None
    # [B, K] int64: the token that each follows, counted from 1; 0: the committed tokens. Parents
    # come before children, siblings differ. None: each draft is one path.
    parents: Tensor | None = None
    methods: Sequence[str] | None = None  # who guessed for each request; None: the drafter itself

    @staticmethod
    def empty(num_requests: int) -> Proposal:
        """Propose nothing for each of `num_requests` requests."""
        return Proposal(
            tokens=torch.zeros((num_requests, 0), dtype=torch.int64),
            lengths=torch.zeros(num_requests, dtype=torch.int64),
            probs=None,
        )

    @staticmethod
    def from_lists(drafts: Sequence[Sequence[int]]) -> Proposal:
        """Pack deterministic drafts, one list per request; [[5, 6], []] -> lengths [2, 0]."""
        width = max((len(draft) for draft in drafts), default=0)
        padded = [[*draft, *[0] * (width - len(draft))] for draft in drafts]
        return Proposal(
            tokens=torch.tensor(padded, dtype=torch.int64).reshape(len(drafts), width),
            lengths=torch.tensor([len(draft) for draft in drafts], dtype=torch.int64),
            probs=None,
        )

    @staticmethod
    def from_trees(trees: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Proposal:
        """Pack deterministic trees, (tokens, parents) for each request: see `parents`."""
        tokens = Proposal.from_lists([tokens for tokens, _ in trees])
        parents = Proposal.from_lists([parents for _, parents in trees])
        return Proposal(tokens.tokens, tokens.lengths, None, parents.tokens)


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Where the rows of a step lie in the cache when some of them are drafts' side paths.

    A request with 10 committed tokens and a tree in which 11 and 12 both follow them keeps the two
    at places 10 and 11; both have position 10. Row 12 sees places [0, 10) and 11.
    """

    places: Tensor  # [N] int64, the place of each row in its request's cache
    branch_at: Tensor  # [N] int64, from this position on a row sees its own path alone
    paths: Tensor  # [N, D] int64, places of positions branch_at, branch_at + 1, ..; the last one is
    # the row itself, at its position. Right-padded with anything.


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One step's tokens, flattened. Request b owns tokens [starts[b], starts[b + 1])."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, consecutive inside a request but for trees
    starts: Tensor  # [B + 1] int64
    block_tables: Tensor  # [B, max_blocks] int64, padded with 0; block of position p is p // size
    logit_rows: Tensor  # [M] int64, tokens whose logits are wanted; others skip the projection
    # Where a row's bits must not depend on its company (model/bits), rows are of two kinds:
    num_fine: int  # the first so many tokens go in small pieces, the rest in a prompt's big ones
    num_sampling_rows: int  # the same of logit_rows: the first so many are sampled from
    tree: TreeRows | None = None  # None: every row lies at its position and sees all before it

    @staticmethod
    def of_one_request(
        token_ids: Tensor, first: int, block_size: int, *, last_only: bool = False
    ) -> ForwardInput:
        """Lay out tokens [N] of one request from position `first` on; its blocks are 0, 1, 2, ...

        For measuring: logits of every token, or of the last one alone.
        """
        count, device = len(token_ids), token_ids.device
        rows = torch.arange(count, device=device)
        return ForwardInput(
            token_ids=token_ids,
            positions=first + rows,
            starts=torch.tensor([0, count], device=device),
            block_tables=torch.arange(-(-(first + count) // block_size), device=device)[None],
            logit_rows=rows[-1:] if last_only else rows,
            num_fine=count,
            num_sampling_rows=1 if last_only else count,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an acceptance rule decided for each request of a batch."""

    num_accepted: Tensor  # [B] int64, draft tokens kept; the next token is not counted
    next_tokens: Tensor  # [B] int64, the token that the target adds: recovered or bonus


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What a step meant for one request, as its drafter hears it (after stops cut the block)."""

    request_id: int
    num_drafted: int
    num_accepted: int  # draft tokens that reached the output
    emitted: tuple[int, ...]  # accepted tokens and the next token, cut at a stop
    finished: bool
    method: str = "none"  # who had guessed
    draft_depth: int | None = None  # of a tree's longest path; None: the draft was one path


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was where it stands."""

    token_id: int
    logprob: float  # natural logarithm
    rank: int  # 1: nothing was likelier
    top: tuple[tuple[int, float], ...]  # the likeliest tokens there, best first; the token or not


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What a step gave one request."""

    request_id: int
    token_ids: tuple[int, ...]  # newly committed, in order
    # The text that each of them made certain; None: nobody looked for stop strings, so whoever
    # reads the event turns tokens to text, beside the next pass.
    pieces: tuple[str, ...] | None
    num_accepted: int  # how many of token_ids a drafter had guessed; they come first
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None  # of token_ids, if the request wants them
    stopped_by: int | str | None = None  # the stop token or string that ended it, if one did
    method: str = "none"  # who had guessed
