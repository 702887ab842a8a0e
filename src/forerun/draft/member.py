"""One of several drafters: what it raises costs a request its guesses, and no other drafter's."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..types import DraftRequest, Features, Proposal, RequestOutcome
from .base import Drafter
from .candid import Candid, Guess

__all__ = ["CallTimes", "Drawn", "Member"]

logger = logging.getLogger(__name__)

LAST_CALLS = 9
LEAST_CALLS = 2  # the first one compiles, and catches up on a prompt


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sampled draft: its length was fixed before, so it is taken whole or not asked for."""

    tokens: Sequence[int]
    probs: Tensor  # [k, V] float32


class CallTimes:
    """What calls take, by how many requests they are for: the median of the last few."""

    def __init__(self) -> None:
        self._taken: dict[int, deque[float]] = {}  # by the number's bits

    def add(self, num_requests: int, seconds: float) -> None:
        """Note a call."""
        last = self._taken.setdefault(num_requests.bit_length(), deque(maxlen=LAST_CALLS))
        last.append(seconds)

    def each_s(self, num_requests: int) -> float:
        """Say what a call takes for each of so many requests; 0 as long as nothing is known.

        A call for another number of them is taken to last as long.
        """
        known = [bits for bits, last in self._taken.items() if len(last) >= LEAST_CALLS]
        if not known:
            return 0.0
        nearest = min(known, key=lambda bits: abs(bits - num_requests.bit_length()))
        last = sorted(self._taken[nearest])
        return last[(len(last) - 1) // 2] / num_requests


class Member:
    """A drafter with a name, the time it takes, and the requests that it has failed."""

    def __init__(self, name: str, drafter: Drafter, clock: Callable[[], float]) -> None:
        self.name = name
        self.abilities = drafter.abilities
        self.is_free = self.abilities.cost_class == "free"
        self.times = CallTimes()
        self.faults: Counter[str] = Counter()
        self.untold: list[tuple[int, str]] = []  # whom it failed and why, for `HasParts`
        self._drafter = drafter
        self._candid = drafter if isinstance(drafter, Candid) else None
        self._clock = clock
        self._failed: dict[int, Exception] = {}

    def failure(self, request_id: int) -> Exception | None:
        """Say what it raised about a request that it is no longer asked about."""
        return self._failed.get(request_id)

    def start(self, request: DraftRequest) -> None:
        """Introduce a request."""
        try:
            self._drafter.start(request)
        except Exception as error:  # noqa: BLE001  (whatever it is, others go on)
            self._give_up(request.request_id, "start_failed", error)

    def ask(self, requests: Sequence[DraftRequest]) -> list[Guess | Drawn]:
        """Ask for guesses; one of those that it has failed is empty."""
        asked = [each for each in requests if each.request_id not in self._failed]
        if not asked:
            return [Guess()] * len(requests)
        if self._candid is not None:
            found = {each.request_id: self._ask_candid(self._candid, each) for each in asked}
        else:
            begin_s = self._clock()
            found = self._ask(asked)
            self.times.add(len(asked), self._clock() - begin_s)
        return [found.get(each.request_id, Guess()) for each in requests]

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        """Tell it what became of a step, as far as it is to hear of it."""
        heard = [each for each in outcomes if each.request_id not in self._failed]
        if features is not None:
            reads = self.abilities.features is not None
            features = features.of(lambda key: key not in self._failed) if reads else None
        if not heard and features is None:
            return
        try:
            self._drafter.observe(heard, features)
        except Exception as error:  # noqa: BLE001
            keys = {each.request_id for each in heard}
            keys |= {each.request_id for each in features.spans} if features is not None else set()
            if len(keys) == 1:
                self._give_up(keys.pop(), "observe_failed", error)
                return
            for key in sorted(keys):  # each alone, to learn whose it is
                own = None if features is None else features.of(key.__eq__)
                self.observe([each for each in heard if each.request_id == key], own)

    def finish(self, request_id: int) -> None:
        """Have it drop a request."""
        try:
            self._drafter.finish(request_id)
        except Exception as error:  # noqa: BLE001
            self._give_up(request_id, "finish_failed", error)
        self._failed.pop(request_id, None)

    def _ask_candid(self, drafter: Candid, request: DraftRequest) -> Guess | Drawn:
        try:
            return drafter.guess_with_chances(request)
        except Exception as error:  # noqa: BLE001
            self._give_up(request.request_id, "propose_failed", error)
            return Guess()

    def _ask(self, requests: Sequence[DraftRequest]) -> dict[int, Guess | Drawn]:
        try:
            guesses = _read(self._drafter.propose(requests), len(requests))
        except Exception as error:  # noqa: BLE001
            if len(requests) == 1:
                self._give_up(requests[0].request_id, "propose_failed", error)
                return {}
            alone = [self._ask([each]) for each in requests]  # to learn whose it is
            return {key: guess for part in alone for key, guess in part.items()}
        return {each.request_id: guess for each, guess in zip(requests, guesses, strict=True)}

    def _give_up(self, request_id: int, reason: str, error: Exception) -> None:
        self._failed[request_id] = error
        self.faults[reason] += 1
        self.untold.append((request_id, f"{self.name}: {reason}"))
        logger.warning(
            "drafter %s failed (%s); request %d goes on without it",
            self.name,
            reason,
            request_id,
            exc_info=error,
        )


def _read(proposal: Proposal, num_requests: int) -> list[Guess | Drawn]:
    """Take a proposal apart: rows of zero probabilities were not drawn."""
    tokens, lengths = proposal.tokens.tolist(), proposal.lengths.tolist()
    parents = None if proposal.parents is None else proposal.parents.tolist()
    if not len(tokens) == len(lengths) == num_requests:
        raise ValueError(f"{len(tokens)} drafts for {num_requests} requests")
    guesses: list[Guess | Drawn] = []
    for index, (row, length) in enumerate(zip(tokens, lengths, strict=True)):
        if not 0 <= length <= len(row):
            raise ValueError(f"a draft of length {length} in a row of {len(row)}")
        own = row[:length]
        if proposal.probs is not None and bool(proposal.probs[index, :length].any()):
            guesses.append(Drawn(own, proposal.probs[index, :length]))
        else:
            guesses.append(Guess(own, None if parents is None else _sound(parents[index][:length])))
    return guesses


def _sound(parents: Sequence[int]) -> Sequence[int] | None:
    """Check that parents come before children; None for a path, which needs none."""
    for node, parent in enumerate(parents, 1):
        if not 0 <= parent < node:
            raise ValueError(f"token {node} of a tree follows token {parent}")
    return None if list(parents) == list(range(len(parents))) else parents
