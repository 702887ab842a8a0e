"""Faults on purpose, for tests of what an engine and a server do about them.

The environment variable FORERUN_FAULTS switches them on, with a loud warning, for a whole engine:

    drafter_raises=0.2     each draft raises with this probability
    drafter_lies=0.2       each draft is cut short and rotated: wrong, and well formed
    step_slow=0.05         each pass takes so many seconds longer
    step_hangs=30:2.5      pass number 30 takes 2.5 seconds longer
    step_raises=0.02       each pass raises with this probability
    cache_full=0.1         each request for cache blocks is refused with this probability

Several are separated by commas. The same seed gives the same faults.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..cache.blocks import BlockPool
from ..draft.base import Abilities, Drafter
from ..errors import ConfigError, nearest_name
from ..types import (
    DraftRequest,
    Features,
    FeatureSpec,
    ForwardInput,
    HiddenStates,
    Proposal,
    RequestOutcome,
)
from .runner import Runner

__all__ = [
    "VARIABLE",
    "Faults",
    "FaultyDrafter",
    "FaultyPool",
    "FaultyRunner",
    "faults_asked_for",
]

logger = logging.getLogger(__name__)

VARIABLE = "FORERUN_FAULTS"


@dataclass(frozen=True, slots=True)
class Faults:
    """Which faults an engine is to have."""

    drafter_raises: float = 0.0
    drafter_lies: float = 0.0
    step_slow: float = 0.0
    step_hangs: tuple[int, float] | None = None
    step_raises: float = 0.0
    cache_full: float = 0.0

    @staticmethod
    def parse(text: str) -> Faults:
        """Read what the variable holds."""
        known = [each.name for each in fields(Faults)]
        given: dict[str, object] = {}
        for part in filter(None, (each.strip() for each in text.split(","))):
            name, _, value = part.partition("=")
            if name not in known:
                raise ConfigError(
                    f"{VARIABLE}: unknown fault {name!r}; {nearest_name(name, known)}"
                )
            try:
                if name == "step_hangs":
                    number, _, seconds = value.partition(":")
                    given[name] = (int(number), float(seconds))
                else:
                    given[name] = float(value)
            except ValueError:
                raise ConfigError(f"{VARIABLE}: {part!r} has no number") from None
        return Faults(**given)  # type: ignore[arg-type]


def faults_asked_for() -> Faults | None:
    """Read the environment; None, as nearly always: no faults."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    logger.warning("%s=%s: this engine fails on purpose", VARIABLE, text)
    return Faults.parse(text)


class FaultyDrafter:
    """A drafter that raises or lies now and then."""

    def __init__(self, inner: Drafter, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._random = random.Random(1)

    @property
    def abilities(self) -> Abilities:
        return self._inner.abilities

    def start(self, request: DraftRequest) -> None:
        self._inner.start(request)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        if self._random.random() < self._faults.drafter_raises:
            raise RuntimeError("a fault on purpose: the drafter raised")
        proposal = self._inner.propose(requests)
        if proposal.probs is None and self._random.random() < self._faults.drafter_lies:
            return Proposal(proposal.tokens.flip(-1), proposal.lengths // 2, None)
        return proposal

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        self._inner.observe(outcomes, features)

    def finish(self, request_id: int) -> None:
        self._inner.finish(request_id)


class FaultyPool(BlockPool):
    """Cache blocks that are refused now and then."""

    def __init__(self, num_blocks: int, block_size: int, faults: Faults) -> None:
        super().__init__(num_blocks, block_size)
        self._faults = faults
        self._random = random.Random(2)

    def allocate(self, count: int) -> list[int] | None:
        if count and self._random.random() < self._faults.cache_full:
            return None
        return super().allocate(count)


class FaultyRunner:
    """Passes that are slow, hang or raise now and then."""

    def __init__(self, inner: Runner, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._random = random.Random(3)
        self._num_passes = 0

    @property
    def device(self) -> torch.device:
        return self._inner.device

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    @property
    def row_cost(self) -> float:
        return self._inner.row_cost

    @property
    def pass_s(self) -> float:
        return self._inner.pass_s

    def scrub(self, places: Sequence[tuple[int, int]]) -> None:
        self._inner.scrub(places)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._inner.move(sources, targets)

    def forward(
        self, step: ForwardInput, wanted: FeatureSpec | None = None
    ) -> tuple[Tensor, HiddenStates | None]:
        self._num_passes += 1
        if self._faults.step_slow:
            time.sleep(self._faults.step_slow)
        hangs = self._faults.step_hangs
        if hangs is not None and hangs[0] == self._num_passes:
            time.sleep(hangs[1])
        if self._random.random() < self._faults.step_raises:
            raise RuntimeError("a fault on purpose: the pass raised")
        return self._inner.forward(step, wanted)
