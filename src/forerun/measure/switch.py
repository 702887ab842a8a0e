"""A drafter that can be switched off between requests: both modes on one engine, nothing else
different.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import SpeculationConfig
from ..draft.base import Abilities, Drafter
from ..engine.engine import Engine
from ..types import DraftRequest, Features, Proposal, RequestOutcome

__all__ = ["SwitchedDrafter", "switched_engine"]


class SwitchedDrafter:
    """Passes everything on while `enabled`; proposes nothing while not, which is plain decoding."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.enabled = True

    @property
    def abilities(self) -> Abilities:
        return self._inner.abilities

    def start(self, request: DraftRequest) -> None:
        self._inner.start(request)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        return self._inner.propose(requests) if self.enabled else Proposal.empty(len(requests))

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        self._inner.observe(outcomes, features)

    def finish(self, request_id: int) -> None:
        self._inner.finish(request_id)


def switched_engine(
    model: str, speculation: SpeculationConfig, **options: Any
) -> tuple[Engine, SwitchedDrafter]:
    """Load a model with a drafter that can be switched, and nothing that favours a second run.

    `options` are the fields of `EngineConfig`.
    """
    made: list[SwitchedDrafter] = []

    def wrap(inner: Drafter) -> Drafter:
        made.append(SwitchedDrafter(inner))
        return made[0]

    # A prefix found in the cache would spare the second run of a prompt what the first one paid.
    engine = Engine.from_pretrained(
        model, speculation=speculation, wrap=wrap, enable_prefix_caching=False, **options
    )
    return engine, made[0]
