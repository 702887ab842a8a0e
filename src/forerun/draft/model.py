"""A smaller model guesses what the target will say: its own weights, its own cache, one batch.

Each step it catches up on what requests have become since it last saw them, all in one pass, and
then guesses one token for each of them a pass. Requests that are far behind catch up in pieces over
several steps, so that a long prompt stops neither the others nor its own first token.

Greedy drafts end early where they are no longer likely to hold; sampled ones, verified by their
probabilities, fill the length that was asked for: a length chosen by what was drawn would move the
output.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import InvalidLogits
from ..types import DraftRequest, Features, Proposal, RequestOutcome
from .base import Abilities
from .context import Context, TokenContext, UnknownToken
from .draft_cache import DraftCache
from .network import DraftNetwork, Piece
from .picking import pick_likeliest, pick_sample
from .retokenise import TextContext
from .vocabulary import Link, LinkKind

__all__ = ["DraftModelDrafter"]

logger = logging.getLogger(__name__)

# Tokens of a pass: one more draft pass, which costs c of a target's pass, must bring at least
# c x this many, or the target's passes alone would bring more in that time.
RATE = 2.0

# Why a request gets no draft, and the number that goes with it.
REASONS = {
    "no_block": "the cache of the draft model, %d blocks, is full",
    "context_end": "the context of the draft model, %d positions, is",
    "unknown_token": "a token has no like in the draft model's vocabulary of %d",
}


@dataclass(frozen=True, slots=True)
class _Way:
    """One way between the vocabularies."""

    begin: Callable[[], Context]
    choices: Tensor | None  # [W] tokens that may be drafted; None: all


@dataclass(slots=True)
class _Follower:
    """What the drafter knows of a request, beside its part of the cache."""

    way: _Way
    context: Context
    over: bool = False  # it never gets drafts again


@dataclass(slots=True)
class _Run:
    """One request's draft in the making."""

    place: int  # in the batch
    request: DraftRequest
    follower: _Follower
    length: int  # most draft tokens
    least: float  # likelihood under which the next token is not worth its pass
    sampled: bool
    likely: float = 1.0  # of all of `drafted` to hold
    drafted: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)  # [W] each, if sampled
    broken: bool = False  # what it drew cannot be computed further

    def goes_on(self, ends: Sequence[int]) -> bool:
        if len(self.drafted) >= self.length or self.broken:
            return False
        if self.sampled:
            return True
        ended = self.drafted[-1] in ends and not self.request.params.ignore_eos
        return self.likely >= self.least and not ended


class DraftModelDrafter:
    """Runs a decoder of its own ahead of the target."""

    def __init__(
        self,
        network: DraftNetwork,
        cache: DraftCache,
        link: Link,
        *,
        sampled: bool,
        max_positions: int,
        most_rows: int,
        cost: float,
    ) -> None:
        """`most_rows` of prompts go into a step; `cost` is a draft pass's in target passes."""
        assert not sampled or link.kind is LinkKind.SAME, "q must be over the target's tokens"
        self.abilities = Abilities(method="draft-model", gives_probs=sampled, cost_class="pass")
        self.cache = cache
        self.skipped: Counter[str] = Counter()  # drafts that there were none of, by reason
        self._network = network
        self._link = link
        self._sampled = sampled
        self._max_positions = max_positions
        self._most_rows = most_rows
        self._cost = cost
        self._followers: dict[int, _Follower] = {}
        self._failed: dict[int, str] = {}
        choices = link.map.choices
        self._by_token = _Way(lambda: TokenContext(link), self._choose_from(choices))
        self._by_text: _Way | None = None
        if link.spellers is not None:
            spelled = [token for token, text in enumerate(link.spellers[1].bytes_of) if text]
            self._by_text = _Way(lambda: TextContext(link), self._choose_from(spelled))

    def start(self, request: DraftRequest) -> None:
        way = self._by_token
        if self._link.kind is LinkKind.TEXT:
            assert self._by_text is not None, "link_vocabularies refuses what has no way"
            way = self._by_text
        self._followers[request.request_id] = _Follower(way, way.begin())
        self.cache.start(request.request_id, request.params.cache_salt)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Guess for each request.

        Raises:
            InvalidLogits: of a request whose logits are NaN or infinite; the others can be asked
                again without it.
        """
        for request in requests:
            if request.request_id in self._failed:
                raise InvalidLogits(self._failed[request.request_id])
        runs, parts = self._catch_up(requests)
        drafting = runs
        place = 0
        while parts:
            logits = self._pass(parts)
            if not drafting:
                break
            self._pick(drafting, logits, place)
            drafting = [run for run in drafting if run.goes_on(self._link.draft.eos_ids)]
            parts = [(run.request.request_id, self._next_piece(run)) for run in drafting]
            place += 1
        return self._pack(requests, runs)

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        """Learn nothing here: the tokens themselves tell, when the next guess is due."""

    def finish(self, request_id: int) -> None:
        self.cache.finish(request_id)
        self._followers.pop(request_id, None)
        self._failed.pop(request_id, None)

    def _catch_up(
        self, requests: Sequence[DraftRequest]
    ) -> tuple[list[_Run], list[tuple[int, Piece]]]:
        """Plan the pass that catches up: who will draft after it, and all its pieces.

        The rows that say what comes next are those of the runs, in their order.
        """
        behind = []
        for place, request in enumerate(requests):
            computed = self._read(request)
            if computed is not None:
                follower = self._followers[request.request_id]
                pending = len(follower.context.ids) - computed
                behind.append((pending, place, request, follower))
        behind.sort(key=lambda each: each[0])  # a long prompt must not stop the others
        asked = {request.request_id for request in requests}
        budget = self._most_rows
        runs, parts = [], []
        for pending, place, request, follower in behind:
            run = self._make_run(place, request, follower)
            count = min(pending, budget)
            if run is None or count == 0:
                continue
            key, ids = request.request_id, follower.context.ids
            if not self.cache.reserve(key, len(ids) + run.length - 1, asked):
                self._skip("no_block", self.cache.num_blocks)
                continue
            first = len(ids) - pending
            catches_up = count == pending
            piece = Piece(ids[first : first + count], first, self.cache.blocks(key), catches_up)
            parts.append((key, piece))
            budget -= count
            if catches_up:
                runs.append(run)
        return runs, parts

    def _read(self, request: DraftRequest) -> int | None:
        """Read what a request has become: how much of it is computed; None: no drafts for it."""
        follower = self._followers[request.request_id]
        if request.max_draft == 0 or follower.over:
            return None
        try:
            changed = follower.context.update(request.tokens)
        except UnknownToken:
            if self._by_text is None:
                self._end(request, "unknown_token", self._link.draft.vocab_size)
                return None
            follower.way, follower.context = self._by_text, self._by_text.begin()
            follower.context.update(request.tokens)
            changed = 0
        ids = follower.context.ids
        if len(ids) > self._max_positions:
            self._end(request, "context_end", self._max_positions)
            return None
        return self.cache.align(request.request_id, ids, changed) if ids else None

    def _make_run(self, place: int, request: DraftRequest, follower: _Follower) -> _Run | None:
        """Fix how far a request may draft; None: its context leaves less than it must have."""
        context = follower.context
        # The last draft token is never computed, so it needs no position.
        room = self._max_positions - len(context.ids) + 1
        sampled = self._sampled and request.params.temperature > 0
        length = context.length(request.max_draft)
        if sampled and room < length:
            return None
        least = RATE * (self._cost + request.row_cost)
        return _Run(place, request, follower, min(length, room), least, sampled)

    def _next_piece(self, run: _Run) -> Piece:
        key = run.request.request_id
        return Piece(run.drafted[-1:], self.cache.num_computed(key), self.cache.blocks(key))

    def _pass(self, parts: Sequence[tuple[int, Piece]]) -> Tensor:
        """Do a pass, and note what it computed."""
        try:
            logits = self._network.forward([piece for _, piece in parts])
        except BaseException:
            for key, _ in parts:  # nobody knows what was written
                self.cache.drop(key, suspect=True)
            raise
        for key, piece in parts:
            self.cache.append(key, piece.token_ids)
        return logits

    def _pick(self, runs: Sequence[_Run], logits: Tensor, place: int) -> None:
        """Give each run its next token, from the row of logits [M, V] that is its own."""
        groups: dict[tuple[int, bool], list[int]] = {}
        for row, run in enumerate(runs):
            groups.setdefault((id(run.follower.way), run.sampled), []).append(row)
        for (_, sampled), rows in groups.items():
            members = [runs[row] for row in rows]
            own = logits if len(rows) == len(runs) else logits[rows]
            choices = members[0].follower.way.choices
            own = own if choices is None else own[:, choices]
            if sampled:
                requests = [run.request for run in members]
                columns, probs, bad = pick_sample(own, requests, place)
                for run, row_probs in zip(members, probs, strict=True):
                    run.probs.append(row_probs)
                if place:
                    bad = self._break(members, bad)
            else:
                columns, likely, bad = pick_likeliest(own)
                for run, likelihood in zip(members, likely, strict=True):
                    run.likely *= likelihood
            self._check(members, bad)
            ids = columns if choices is None else choices[torch.tensor(columns)].tolist()
            for run, token in zip(members, ids, strict=True):
                run.drafted.append(token)
                if not run.broken:
                    self.cache.prove(run.request.request_id, len(run.follower.context.ids))

    def _break(self, runs: Sequence[_Run], bad: Sequence[bool]) -> list[bool]:
        """Have sampled drafts that drew what cannot be computed further end in what was certain.

        Dropping them for what they drew would move the output. If the target keeps it, their
        requests fail at the next step, and for what they have become.
        """
        for run, is_bad in zip(runs, bad, strict=True):
            if is_bad:
                run.broken = True
                self.cache.drop(run.request.request_id, suspect=True)
        return [False] * len(bad)

    def _check(self, runs: Sequence[_Run], bad: Sequence[bool]) -> None:
        """Raise if a row is no distribution; the cache of its request goes, scrubbed."""
        for run, is_bad in zip(runs, bad, strict=True):
            if is_bad:
                request = run.request
                position = len(run.follower.context.ids) + len(run.drafted)
                message = (
                    f"the draft model gave NaN or infinite logits at position {position} of "
                    f"request {request.request_id}; check its weights, or try dtype='float32'"
                )
                self._failed[request.request_id] = message
                self.cache.drop(request.request_id, suspect=True)
                raise InvalidLogits(message)

    def _pack(self, requests: Sequence[DraftRequest], runs: Sequence[_Run]) -> Proposal:
        drafts: list[list[int]] = [[] for _ in requests]
        for run in runs:
            if run.broken:
                run.drafted += run.drafted[-1:] * (run.length - len(run.drafted))
            drafts[run.place] = run.follower.context.guess(run.drafted, run.request.max_draft)
        proposal = Proposal.from_lists(drafts)
        sampled = [run for run in runs if run.sampled]
        if not sampled:
            return proposal
        device = sampled[0].probs[0].device
        size = self._link.target.vocab_size
        probs = torch.zeros((*proposal.tokens.shape, size), device=device)
        for run in sampled:
            own = torch.stack(run.probs)  # [k, W]; of one that broke all further rows are its last
            probs[run.place, : run.length, : own.shape[1]] = own[-1]
            probs[run.place, : len(own), : own.shape[1]] = own
        return Proposal(proposal.tokens, proposal.lengths, probs)

    def _end(self, request: DraftRequest, reason: str, number: int) -> None:
        """Draft for a request no more: it can only grow."""
        self._followers[request.request_id].over = True
        self.cache.drop(request.request_id)
        self._skip(reason, number)

    def _skip(self, reason: str, number: int) -> None:
        if not self.skipped[reason]:
            logger.warning("no drafts where " + REASONS[reason], number)
        self.skipped[reason] += 1

    def _choose_from(self, tokens: list[int]) -> Tensor | None:
        decoder = self._network.decoder
        if len(tokens) == decoder.config.vocab_size:
            return None
        return torch.tensor(tokens, device=decoder.device)
