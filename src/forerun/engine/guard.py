"""Between the engine and a drafter: a draft can fail, an answer cannot.

What a drafter raises, or returns that makes no sense, ends in plain decoding for the request
concerned, counted by reason. The others of the batch keep their drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..draft.base import Drafter, HasParts
from ..draft.forced import ForcedDrafter
from ..types import DraftRequest, Features, FeatureSpec, Proposal, RequestOutcome
from .constrain import constrain, find_forced
from .drafts import NO_DRAFT, Draft, find_fault, pack_drafts, read_drafts
from .request import Request

__all__ = ["GuardedDrafter", "Guesses"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Guesses:
    """A step's drafts, who guessed them, and what grammars allow at their positions."""

    proposal: Proposal
    methods: tuple[str, ...]  # of each request
    masks: tuple[NDArray[np.int32] | None, ...]  # [length + 1, words] bits; None: no grammar


class GuardedDrafter:
    """A drafter whose every failure is caught, counted and answered with no draft."""

    def __init__(
        self, drafter: Drafter, vocab_size: int, row_cost: float = 0.0, pass_s: float = 0.0
    ) -> None:
        """`row_cost`, `pass_s`: see `DraftRequest`."""
        self._drafter = drafter
        self._forced = ForcedDrafter()
        self._row_cost = row_cost
        self._pass_s = pass_s
        self._vocab_size = vocab_size
        self._alive: dict[int, Request] = {}
        self._faults: list[str] = []  # reasons, since they were last taken

    @property
    def method(self) -> str:
        """What the drafter is called where guesses are counted."""
        return self._drafter.abilities.method

    @property
    def features(self) -> FeatureSpec | None:
        """Which hidden states the drafter wants to be given."""
        return self._drafter.abilities.features

    def start(self, request: Request) -> None:
        """Introduce a request to the drafter."""
        self._alive[request.request_id] = request
        try:
            self._drafter.start(request.draft_view(0, self._row_cost, self._pass_s))
        except Exception:  # noqa: BLE001
            self._give_up(request, "start_failed")

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Guesses:
        """Ask for drafts of at most the given lengths. One that fails alone fails alone."""
        views = [
            request.draft_view(
                max_draft, self._row_cost, self._pass_s, find_forced(request, max_draft)
            )
            for request, max_draft in wanted
        ]
        # What only one token can follow needs no guess.
        forced = [view for view in views if view.forced]
        asked = [view for view in views if view.max_draft > 0 and not view.forced]
        drafts = self._ask(self._drafter, asked) if asked else {}
        drafts |= self._ask(self._forced, forced) if forced else {}
        taken = [drafts.get(view.request_id, NO_DRAFT) for view in views]
        masks: list[NDArray[np.int32] | None] = [None] * len(views)
        for index, (request, _) in enumerate(wanted):
            if not request.takes_trees:
                taken[index] = taken[index].first_path()
            if request.grammar is not None:
                fitted = constrain(request, taken[index], self._vocab_size)
                taken[index], masks[index] = fitted.draft, fitted.masks
        self._count_parts()
        methods = tuple(draft.method or self.method for draft in taken)
        return Guesses(pack_drafts(taken), methods, tuple(masks))

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        """Tell the drafter what became of a step, but for requests that it has failed."""
        heard = [each for each in outcomes if self._alive[each.request_id].drafting]
        if features is not None:
            features = features.of(self._is_drafting)
        if not heard and features is None:
            return
        try:
            self._drafter.observe(heard, features)
        except Exception:  # noqa: BLE001
            concerned = {each.request_id for each in heard}
            if features is not None:
                concerned |= {each.request_id for each in features.spans}
            if len(concerned) == 1:
                self._give_up(self._alive[concerned.pop()], "observe_failed")
                return
            # Tell it each alone, to learn whose it is.
            for key in sorted(concerned):
                own = None if features is None else features.of(key.__eq__)
                self.observe([each for each in heard if each.request_id == key], own)

    def finish(self, request_id: int) -> None:
        """Have the drafter drop a request."""
        self._count_parts()
        request = self._alive.pop(request_id)
        try:
            self._drafter.finish(request_id)
        except Exception:  # noqa: BLE001
            self._give_up(request, "finish_failed")

    def _count_parts(self) -> None:
        """Count what parts of the drafter have failed: the request goes on with the others."""
        if isinstance(self._drafter, HasParts):
            for request_id, reason in self._drafter.take_faults():
                if request_id in self._alive:
                    self._alive[request_id].counters.count_fault(reason)

    def take_faults(self) -> tuple[str, ...]:
        """Hand over why drafts failed since the last call."""
        faults, self._faults = tuple(self._faults), []
        return faults

    def check_integrity(self, unfinished: set[int]) -> None:
        """Assert that exactly the unfinished requests are known here."""
        assert set(self._alive) == unfinished, "a finished request was never taken from the drafter"

    def _is_drafting(self, request_id: int) -> bool:
        request = self._alive.get(request_id)
        return request is not None and request.drafting

    def _ask(self, drafter: Drafter, views: Sequence[DraftRequest]) -> dict[int, Draft]:
        method = drafter.abilities.method
        try:
            drafts = read_drafts(drafter.propose(views), len(views))
        except Exception:  # noqa: BLE001
            if len(views) == 1:
                self._give_up(self._alive[views[0].request_id], "propose_failed")
                return {}
            # Ask for each alone, to learn whose it is.
            return {
                key: draft for view in views for key, draft in self._ask(drafter, [view]).items()
            }
        kept = {}
        for view, draft in zip(views, drafts, strict=True):
            reason = find_fault(draft, view.max_draft, self._vocab_size)
            if reason is None:
                kept[view.request_id] = replace(
                    draft.cut(view.max_draft), method=draft.method or method
                )
            else:
                self._give_up(self._alive[view.request_id], reason)
        return kept

    def _give_up(self, request: Request, reason: str) -> None:
        """Decode a request plainly from now on. Called inside the handler, for the traceback."""
        request.drafting = False
        request.counters.count_fault(reason)
        self._faults.append(reason)
        logger.warning(
            "drafter failed (%s); request %d goes on without",
            reason,
            request.request_id,
            exc_info=True,
        )
