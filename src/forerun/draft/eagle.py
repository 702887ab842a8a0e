"""EAGLE: a head continues the target's hidden states, and guesses tokens from what it expects.

Its keys and values lie in the target's blocks: entry t belongs to the target's state of position t
and to token t + 1. So whoever takes over a prefix takes over the head's part of it as well. A step
first reads the states that came since the last one, all requests in one pass; each further pass
looks one token deeper, at the likeliest nodes of each request's tree (EAGLE-2 2406.16858), until a
look is worth less than it costs. Where a request takes no trees its tree is one path.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..errors import InvalidLogits
from ..heads.eagle_runner import EagleRunner, feature_spec
from ..types import DraftRequest, Features, Proposal, RequestOutcome
from .base import Abilities
from .guesses import DraftWords, likeliest
from .pending import Pending, select_states
from .rows import RequestRows, lay_out
from .tree import GrowingTree

__all__ = ["EagleDrafter"]

MAX_DEPTH = 10
BEAM = 4  # nodes of a depth that are looked at, and children of each
RATE = 1.5  # tokens of a pass: what costs c of a pass must bring at least c times this many
LEAST = 0.02  # less likely than this nothing is drafted, however cheap
NEXT_HOLDS = 0.6  # how likely the child of a node that holds is right, roughly
EAGER_ROWS = 64  # unread states that are not left for the next draft
COST_WEIGHT = 0.1  # of a new measurement


@dataclass(slots=True)
class _Growth:
    """One request's draft on the way."""

    request: DraftRequest
    tree: GrowingTree = field(default_factory=GrowingTree)
    states: dict[int, Tensor] = field(default_factory=dict)  # [1, E], of looked-at nodes; 0: root
    places: dict[int, int] = field(default_factory=dict)  # of looked-at nodes in the head's cache
    looked_at: list[int] = field(default_factory=lambda: [0])  # in the pass that is being made

    @property
    def root(self) -> int:
        """The position of the last committed token's entry: the first that the draft writes."""
        return len(self.request.tokens) - 1

    def states_above(self) -> Tensor:
        """What the nodes that are looked at read, [n, E]."""
        above = [self.states[self.tree.nodes[node - 1].parent] for node in self.looked_at]
        return above[0] if len(above) == 1 else torch.cat(above)


class EagleDrafter:
    """A head with its cache beside the target's, and the states that it has not read yet."""

    def __init__(
        self,
        runner: EagleRunner,
        draft_ids: Tensor | None,
        *,
        num_blocks: int,
        block_size: int,
        most_rows: int,
        device: torch.device,
        trees: bool = True,
    ) -> None:
        """`most_rows` bounds a pass; `device` is the target's."""
        self.abilities = Abilities(
            method="eagle",
            features=feature_spec(runner.config),
            gives_trees=trees,
            cost_class="pass",
        )
        self._runner = runner
        self._words = DraftWords(draft_ids)
        self._cache = KVCache(runner.cache_shape(block_size), num_blocks, device)
        self._most_rows = most_rows
        self._trees = trees
        self._pending: dict[int, Pending] = {}
        self._look_s: float | None = None  # of a pass that looks deeper

    @property
    def num_requests(self) -> int:
        """How many requests it keeps something of."""
        return len(self._pending)

    def start(self, request: DraftRequest) -> None:
        self._pending[request.request_id] = Pending(request.tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        ready = [_Growth(request) for request in requests if self._can_draft(request)]
        if ready:
            self._read_and_look(ready)
            self._grow(ready)
        trees = {
            each.request.request_id: each.tree.take(
                each.request.max_draft, max(LEAST, RATE * each.request.row_cost)
            )
            for each in ready
        }
        return Proposal.from_trees([trees.get(each.request_id, ([], [])) for each in requests])

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        if features is None:
            return
        eager = []
        for span in features.spans:
            pending = self._pending[span.request_id]
            pending.add(
                span.first, select_states(features, span, self._runner.config.feature_layers)
            )
            if pending.end - pending.first > EAGER_ROWS:
                eager.append((pending, span.blocks))
        for pending, blocks in eager:
            # The last one is left: it guesses, when somebody asks.
            self._read(pending, blocks, pending.end - pending.first - 1)

    def finish(self, request_id: int) -> None:
        self._pending.pop(request_id, None)

    def _can_draft(self, request: DraftRequest) -> bool:
        pending = self._pending[request.request_id]
        in_reach = len(request.tokens) < self._runner.config.layer.max_positions
        # States of all positions but the last token's, which the coming pass computes.
        is_complete = pending.first < pending.end == len(request.tokens) - 1
        return request.max_draft > 0 and in_reach and is_complete

    def _read_and_look(self, ready: Sequence[_Growth]) -> None:
        """Read what came since the last draft; the last row of each request looks ahead."""
        pieces, unread = [], []
        for each in ready:
            pending = self._pending[each.request.request_id]
            rows = min(pending.end - pending.first, self._most_rows)
            self._read(pending, each.request.blocks, pending.end - pending.first - rows)
            tokens = each.request.tokens[pending.first + 1 : pending.first + 1 + rows]
            positions = range(pending.first, pending.first + rows)
            pieces.append(RequestRows(tokens, positions, each.request.blocks, [rows - 1]))
            unread.append(pending.look(rows))
        guesses, states = self._run(pieces, unread, of_target=True, requests=ready)
        for each, piece in zip(ready, pieces, strict=True):
            # Only now: a pass that fails is made again for each request alone.
            self._pending[each.request.request_id].drop(len(piece.tokens))
        ends = accumulate(len(piece.tokens) for piece in pieces)
        for each, own, end in zip(ready, guesses, ends, strict=True):
            each.states[0] = states[end - 1 : end]
            each.tree.grow([0], [own])

    def _grow(self, ready: Sequence[_Growth]) -> None:
        """Look deeper, all requests at once, while it is worth it for any of them."""
        growing = list(ready)
        for depth in range(1, MAX_DEPTH):
            growing = [each for each in growing if self._choose(each, depth, len(growing))]
            if not growing:
                return
            begin_s = time.perf_counter()
            pieces = [self._rows_of(each) for each in growing]
            above = [each.states_above() for each in growing]
            guesses, states = self._run(pieces, above, of_target=False, requests=growing)
            self._note_cost(time.perf_counter() - begin_s)
            row = 0
            for each in growing:
                count = len(each.looked_at)
                for index, node in enumerate(each.looked_at):
                    each.states[node] = states[row + index : row + index + 1]
                each.tree.grow(each.looked_at, guesses[row : row + count])
                row += count

    def _choose(self, growth: _Growth, depth: int, num_together: int) -> bool:
        """Choose the nodes that the next pass looks at for a request; none: it is done."""
        request = growth.request
        last = growth.root + depth  # the position of the deepest node's token
        room = request.max_draft - len(growth.places)
        if depth >= request.max_draft or last >= self._runner.config.layer.max_positions:
            return False
        least = max(LEAST, RATE * request.row_cost)
        beam = min(BEAM if self._branches(request) else 1, room)
        growth.looked_at = growth.tree.best_of_frontier(beam, least)
        scores = [growth.tree.nodes[node - 1].score for node in growth.looked_at]
        gain = NEXT_HOLDS * sum(map(math.exp, scores))
        cost = self._look_cost(request) / num_together
        return bool(growth.looked_at) and gain >= max(LEAST, RATE * (cost + request.row_cost))

    def _rows_of(self, growth: _Growth) -> RequestRows:
        """Lay out the nodes that are looked at: each reads the state of the node above it."""
        nodes = [growth.tree.nodes[node - 1] for node in growth.looked_at]
        for node in growth.looked_at:
            growth.places[node] = growth.root + len(growth.places)
        paths = [
            [growth.places[above] for above in growth.tree.path_to(node)]
            for node in growth.looked_at
        ]
        positions = [growth.root + node.depth - 1 for node in nodes]
        is_path = all(
            path == list(range(growth.root, position + 1))
            for path, position in zip(paths, positions, strict=True)
        )
        return RequestRows(
            tokens=[node.token for node in nodes],
            positions=positions,
            blocks=growth.request.blocks,
            looks=range(len(nodes)),
            branch_at=None if is_path else growth.root,
            paths=() if is_path else paths,
        )

    def _read(self, pending: Pending, blocks: Sequence[int], count: int) -> None:
        """Read the first `count` unread states in passes of their own, without looking ahead."""
        while count > 0:
            rows = min(count, self._most_rows)
            first = pending.first
            tokens = pending.tokens[first + 1 : first + 1 + rows]
            step = lay_out([RequestRows(tokens, range(first, first + rows), blocks, [])])
            self._runner.forward(step, self._cache, pending.look(rows), of_target=True)
            pending.drop(rows)
            count -= rows

    def _run(
        self,
        pieces: Sequence[RequestRows],
        inputs: Sequence[Tensor],  # [n, I] of each piece
        *,
        of_target: bool,
        requests: Sequence[_Growth],
    ) -> tuple[list[list[tuple[int, float]]], Tensor]:
        step, joined = lay_out(pieces), inputs[0] if len(inputs) == 1 else torch.cat(list(inputs))
        logits, states = self._runner.forward(step, self._cache, joined, of_target=of_target)
        count = BEAM if any(self._branches(each.request) for each in requests) else 1
        try:
            return likeliest(logits, count, self._words), states
        except InvalidLogits:
            if len(requests) == 1:
                # Nobody else may meet what lies there: NaN times a weight of zero is NaN.
                for block in requests[0].request.blocks:
                    self._cache.scrub(block, 0)
            raise

    def _branches(self, request: DraftRequest) -> bool:
        return self._trees and request.takes_trees

    def _look_cost(self, request: DraftRequest) -> float:
        """Say what a further pass of the head costs, in passes of the target over one row."""
        if self._look_s is None or request.pass_s == 0:
            return 0.0
        return self._look_s / request.pass_s

    def _note_cost(self, seconds: float) -> None:
        known = self._look_s
        self._look_s = seconds if known is None else known + COST_WEIGHT * (seconds - known)
