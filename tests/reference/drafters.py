"""Fake drafters: right, wrong, careless, broken and malicious, and one that keeps the books."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.draft.base import Abilities, Drafter
from forerun.types import DraftRequest, Proposal, RequestOutcome


class Fake:
    """Propose what `guess` says; the other verbs do nothing."""

    abilities = Abilities()

    def start(self, request: DraftRequest) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        return Proposal.from_lists([self.guess(request) for request in requests])

    def observe(self, outcomes: Sequence[RequestOutcome], features: Tensor | None) -> None: ...

    def finish(self, request_id: int) -> None: ...

    def guess(self, request: DraftRequest) -> list[int]:
        return []


class Oracle(Fake):
    """Know the whole answer: prompt and plain output of every request."""

    def __init__(self, answers: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.answers = [list(answer) for answer in answers]
        self.vocab_size = vocab_size

    def future(self, request: DraftRequest) -> list[int]:
        """List what will follow; junk once that is over."""
        length = len(request.tokens)
        for answer in self.answers:
            if answer[:length] == list(request.tokens):
                return answer[length:]
        raise AssertionError(f"request {request.request_id} left the plain path: {request.tokens}")

    def guess(self, request: DraftRequest) -> list[int]:
        return self.future(request)[: request.max_draft]

    def wrong(self, token: int) -> int:
        return (token + 1) % self.vocab_size


class AlwaysWrong(Oracle):
    def guess(self, request: DraftRequest) -> list[int]:
        return [self.wrong(token) for token in super().guess(request)]


class RightThenWrong(Oracle):
    """Two right, one wrong, and right again, which must not count."""

    def guess(self, request: DraftRequest) -> list[int]:
        right = super().guess(request)
        return right[:2] + [self.wrong(token) for token in right[2:3]] + right[3:]


class TooLong(Oracle):
    """Propose everything to the end and a hundred more, whatever was asked for."""

    def guess(self, request: DraftRequest) -> list[int]:
        return self.future(request) + [7] * 100


class PastEnd(Oracle):
    """Go on past the end of the answer, as far as allowed."""

    def guess(self, request: DraftRequest) -> list[int]:
        return (self.future(request) + list(range(64)))[: request.max_draft]


class Alternating(Oracle):
    """Right, nothing, wrong, right, ... by the length of the text."""

    def guess(self, request: DraftRequest) -> list[int]:
        right = super().guess(request)
        turn = len(request.tokens) % 3
        return [right, [], [self.wrong(token) for token in right]][turn]


class Random(Oracle):
    """Noise, of any length that is allowed, with a right token now and then."""

    def guess(self, request: DraftRequest) -> list[int]:
        dice = random.Random(len(request.tokens))
        right = super().guess(request)
        length = dice.randrange(request.max_draft + 1)
        draft = [dice.randrange(self.vocab_size) for _ in range(length)]
        count = dice.randrange(4)
        return [*right[:count], *draft[count:]][: request.max_draft]


class Shaped(Fake):
    """Return whatever a function makes of the requests: things no drafter should."""

    def __init__(self, make: Callable[[Sequence[DraftRequest]], object]) -> None:
        self.make = make

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        return self.make(requests)  # type: ignore[return-value]


class Spoilt(Fake):
    """Another drafter, but for one request, whose draft is replaced."""

    def __init__(self, inner: Drafter, request_id: int, spoil: Callable[[list[int]], list[int]]):
        self.inner, self.request_id, self.spoil = inner, request_id, spoil

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        proposal = self.inner.propose(requests)
        rows = [
            row[:length]
            for row, length in zip(proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True)
        ]
        return Proposal.from_lists(
            [
                self.spoil(row) if request.request_id == self.request_id else row
                for request, row in zip(requests, rows, strict=True)
            ]
        )


class Raising(Fake):
    """Another drafter that raises in one verb when one request is concerned."""

    def __init__(self, inner: Drafter, verb: str, request_id: int) -> None:
        self.inner, self.verb, self.request_id = inner, verb, request_id

    def _trip(self, verb: str, concerned: Sequence[int]) -> None:
        if verb == self.verb and self.request_id in concerned:
            raise RuntimeError(f"{verb} is broken")

    def start(self, request: DraftRequest) -> None:
        self._trip("start", [request.request_id])
        self.inner.start(request)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        self._trip("propose", [each.request_id for each in requests])
        return self.inner.propose(requests)

    def observe(self, outcomes: Sequence[RequestOutcome], features: Tensor | None) -> None:
        self._trip("observe", [each.request_id for each in outcomes])
        self.inner.observe(outcomes, features)

    def finish(self, request_id: int) -> None:
        self._trip("finish", [request_id])
        self.inner.finish(request_id)


class Bookkeeper(Fake):
    """Another drafter, watched: its contract is checked, what it hears is written down."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.complaints: list[str] = []
        self.steps: dict[int, list[RequestOutcome]] = {}  # every outcome, by request
        self.finished: list[int] = []
        self._alive: dict[int, list[int]] = {}  # tokens as last seen
        self._pending: dict[int, int] = {}  # drafts of this step

    def start(self, request: DraftRequest) -> None:
        self._expect(request.request_id not in self.steps, "started twice")
        self.steps[request.request_id] = []
        self._alive[request.request_id] = list(request.tokens)
        self.inner.start(request)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        for request in requests:
            known = self._alive.get(request.request_id)
            self._expect(known is not None, "asked for a draft outside its life")
            self._expect(request.max_draft > 0, "asked for no draft")
            self._expect(list(request.tokens) == known, "tokens differ from what was observed")
        proposal = self.inner.propose(requests)
        for request, length in zip(requests, proposal.lengths.tolist(), strict=True):
            self._pending[request.request_id] = length
        return proposal

    def observe(self, outcomes: Sequence[RequestOutcome], features: Tensor | None) -> None:
        for outcome in outcomes:
            key = outcome.request_id
            self._expect(key in self._alive, "heard of after its end")
            self._expect(outcome.num_drafted == self._pending.pop(key, 0), "num_drafted differs")
            self.steps.setdefault(key, []).append(outcome)
            if key in self._alive:
                self._alive[key].extend(outcome.emitted)
        self.inner.observe(outcomes, features)

    def finish(self, request_id: int) -> None:
        self._expect(request_id in self._alive, "finished twice, or never started")
        self._alive.pop(request_id, None)
        self._pending.pop(request_id, None)
        self.finished.append(request_id)
        self.inner.finish(request_id)

    def _expect(self, holds: bool, complaint: str) -> None:
        if not holds:
            self.complaints.append(complaint)


def proposal(tokens: object, lengths: object, dtype: torch.dtype = torch.int64) -> Proposal:
    """Build a proposal without any of its promises."""
    return Proposal(torch.tensor(tokens, dtype=dtype), torch.tensor(lengths), None)
