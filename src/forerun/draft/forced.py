"""Draft what nothing else can follow: tokens that a grammar forces cost no guess.

A guess like any other, and verified like any other: forced text may be cut into tokens in ways that
the model does not take.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..types import DraftRequest, Features, Proposal, RequestOutcome
from .base import Abilities

__all__ = ["ForcedDrafter"]


class ForcedDrafter:
    """Propose each request's forced tokens, and nothing where there are none."""

    abilities = Abilities(method="forced")

    def start(self, request: DraftRequest) -> None:
        """Keep nothing."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        return Proposal.from_lists([each.forced[: each.max_draft] for each in requests])

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        """Learn nothing."""

    def finish(self, request_id: int) -> None:
        """Drop nothing."""
