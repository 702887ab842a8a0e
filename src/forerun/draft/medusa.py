"""Medusa: several heads look from one hidden state at the positions behind it, each for itself.

One pass gives every head's likeliest tokens; the tree of their likeliest combinations is the draft
(Medusa 2401.10774, section 2.1), as far as nodes are worth their rows. A fixed tree of ranks, as
published with some heads, may stand in its place. Where a request takes no trees the draft is the
likeliest path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..heads.medusa_runner import MedusaRunner
from ..types import DraftRequest, Features, FeatureSpec, Proposal, RequestOutcome
from .base import Abilities
from .guesses import DraftWords, likeliest
from .tree import best_product, static_tree

__all__ = ["MedusaDrafter"]

WIDTH = 8  # tokens of a head that are looked at
RATE = 1.5  # tokens of a pass: what costs c of a pass must bring at least c times this many
LEAST = 0.02  # less likely than this nothing is drafted, however cheap

Levels = list[list[tuple[int, float]]]  # each head's (token, log-probability), likeliest first


class MedusaDrafter:
    """The heads, and the newest hidden state of each request."""

    def __init__(
        self,
        runner: MedusaRunner,
        draft_ids: Tensor | None,
        *,
        trees: bool = True,
        choices: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`choices` fixes the tree: see `tree.static_tree`."""
        self.abilities = Abilities(
            method="medusa",
            features=FeatureSpec(final=True),
            gives_trees=trees,
            cost_class="pass",
        )
        self._runner = runner
        self._words = DraftWords(draft_ids)
        self._trees = trees
        self._choices = choices
        self._states: dict[int, tuple[int, Tensor]] = {}  # position, state [1, E]

    @property
    def num_requests(self) -> int:
        """How many requests it keeps something of."""
        return len(self._states)

    def start(self, request: DraftRequest) -> None:
        """Keep nothing before a state has come."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        ready = [each for each in requests if self._knows_newest(each)]
        trees = dict(zip([each.request_id for each in ready], self._guess(ready), strict=True))
        return Proposal.from_trees([trees.get(each.request_id, ([], [])) for each in requests])

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        if features is None:
            return
        final = features.states.final
        assert final is not None, "asked for in the abilities"
        for span in features.spans:
            row = int(span.rows[-1])
            last = span.first + len(span.rows) - 1
            # A copy: what a step leaves may be overwritten by the next one.
            self._states[span.request_id] = last, final[row : row + 1].clone()

    def finish(self, request_id: int) -> None:
        self._states.pop(request_id, None)

    def _knows_newest(self, request: DraftRequest) -> bool:
        known = self._states.get(request.request_id)
        # Head 0 looks two positions on: from the last computed token past the newest one.
        return request.max_draft > 0 and known is not None and known[0] == len(request.tokens) - 2

    def _guess(self, ready: Sequence[DraftRequest]) -> list[tuple[list[int], list[int]]]:
        if not ready:
            return []
        x = torch.cat([self._states[each.request_id][1] for each in ready])  # [B, E]
        logits = self._runner.forward(x)  # [H, B, D]
        count = WIDTH if self._trees else 1
        rows = likeliest(logits.flatten(0, 1), count, self._words)
        return [
            self._tree(request, [rows[head * len(ready) + index] for head in range(len(logits))])
            for index, request in enumerate(ready)
        ]

    def _tree(self, request: DraftRequest, levels: Levels) -> tuple[list[int], list[int]]:
        levels = levels[: request.max_draft]
        if not (self._trees and request.takes_trees):
            levels = [level[:1] for level in levels]
        elif self._choices is not None:
            tokens = [[token for token, _ in level] for level in levels]
            return static_tree(self._choices, tokens, request.max_draft)
        return best_product(levels, request.max_draft, max(LEAST, RATE * request.row_cost))
