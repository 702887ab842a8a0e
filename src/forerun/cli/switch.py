"""A drafter that can be switched off between requests: both modes on one engine, nothing else
different. Imported only once an engine is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..draft.base import Abilities, Drafter
from ..types import DraftRequest, Proposal, RequestOutcome

__all__ = ["SwitchedDrafter"]


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

    def observe(self, outcomes: Sequence[RequestOutcome], features: Tensor | None) -> None:
        self._inner.observe(outcomes, features)

    def finish(self, request_id: int) -> None:
        self._inner.finish(request_id)
