"""Small passes captured once per shape and replayed: a launch instead of thousands.

A step of few rows is padded to a shape of few (`choose_shape`), written into the shape's own
buffer, and the layers run over that buffer as they were captured. The vocabulary projection comes
after it, over the rows asked for alone. Rows of padding write to a block that nobody owns, and
what comes of them is dropped. Steps of other shapes, prompts above all, run as they are.

What captures is an argument, and CUDA is named only in `CudaCapture`: all else runs anywhere.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..types import FeatureSpec, ForwardInput, HiddenStates
from .layered import hidden_states
from .paged import (
    GroupShape,
    HostStep,
    PassPlan,
    PassShape,
    Piece,
    cut,
    fill,
    fit_pieces,
    new_host_buffer,
)

__all__ = ["Capture", "CudaCapture", "GraphedDecoder", "PlannedDecoder", "Run", "choose_shape"]

logger = logging.getLogger(__name__)

MAX_ROWS_EACH = 16  # of a request
MAX_ROWS = 256
CHEAP_ROWS = 64  # so many take a pass no longer than one does
MIN_BLOCKS = 4
MAX_WASTE = 4  # blocks gathered for one that is needed
FREE_BLOCKS = 256  # so many may be gathered in any case
MAX_GRAPHS = 64

Run = Callable[[], Tensor]  # fixed work over fixed memory
Capture = Callable[[Run], Run]  # gives what does the same work, faster


class PlannedDecoder(Protocol):
    """A decoder whose layers run as somebody else has planned."""

    device: torch.device

    def forward(self, step: ForwardInput, cache: KVCache) -> Tensor:
        """Run a step as it is: logits [M, V] float32."""
        ...

    def forward_with_states(
        self, step: ForwardInput, cache: KVCache, wanted: FeatureSpec
    ) -> tuple[Tensor, HiddenStates]:
        """Do the same and keep hidden states."""
        ...

    def run_planned(self, plan: PassPlan, cache: KVCache, layers: Sequence[int] = ()) -> Tensor:
        """Run the layers: [1 + layers, N, E], see `layered.hidden_states`."""
        ...

    def project(self, h: Tensor, logit_rows: Tensor, num_sampling_rows: int) -> Tensor:
        """Compute logits [M, V] float32 of rows [M] among h [N, E]."""
        ...


class GraphedDecoder:
    """A decoder with its cache, and the captured passes over both. One step at a time."""

    def __init__(
        self, decoder: PlannedDecoder, cache: KVCache, scratch: int, capture: Capture
    ) -> None:
        """`scratch` is a block of the cache that no request ever owns."""
        self._decoder = decoder
        self._cache = cache
        self._scratch = scratch
        self._capture = capture
        self._works = True
        # Least recently used first; by shape, and by the layers whose states are kept.
        self._graphs: OrderedDict[tuple[PassShape, tuple[int, ...]], _Graph] = OrderedDict()

    @property
    def shapes(self) -> list[PassShape]:
        """The shapes that are captured at present."""
        return [shape for shape, _ in self._graphs]

    @torch.inference_mode()
    def forward(
        self, step: ForwardInput, wanted: FeatureSpec | None = None
    ) -> tuple[Tensor, HiddenStates | None]:
        """Run a step's tokens and store their keys and values: logits [M, V] float32.

        Hidden states beside them, if wanted, hold until the next pass. A step that lies on the host
        is given to the device in one copy, without waiting for it.
        """
        small = self._works and len(step.token_ids) <= MAX_ROWS and step.tree is None
        padded = self._pad(step) if small else None
        layers = () if wanted is None else wanted.layers
        graph = self._find(*padded, layers) if padded is not None else None
        if graph is None:
            if wanted is None:
                return self._decoder.forward(step, self._cache), None
            return self._decoder.forward_with_states(step, self._cache, wanted)
        states = graph.run()  # [1 + layers, N', E]
        logit_rows = graph.plan.logit_rows[: len(step.logit_rows)]
        logits = self._decoder.project(states[0], logit_rows, step.num_sampling_rows)
        return logits, None if wanted is None else hidden_states(states, wanted)

    def _pad(self, step: ForwardInput) -> tuple[PassShape, Tensor] | None:
        """Write a step into a buffer of a shape that it fits, on the host."""
        host, cache = HostStep.of(step), self._cache.shape
        pieces = cut(host)
        width = cache.num_kv_heads * cache.head_size
        shape = choose_shape(pieces, len(host.logit_rows), cache.block_size, width)
        if shape is None:
            return None
        buffer = new_host_buffer(shape, self._decoder.device)
        groups = _deal(pieces, shape.groups)
        fill(PassPlan.over(buffer, shape), host, groups, cache.block_size, self._scratch)
        return shape, buffer

    def _find(
        self, shape: PassShape, numbers: Tensor, layers: tuple[int, ...] = ()
    ) -> _Graph | None:
        """Find or capture the pass of a shape, its numbers in place; None: it cannot be had."""
        graph = self._graphs.get((shape, layers))
        if graph is None:
            graph = self._make(shape, numbers, layers)
            if graph is None:
                return None
            self._graphs[shape, layers] = graph
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        else:
            graph.buffer.copy_(numbers, non_blocking=True)
        self._graphs.move_to_end((shape, layers))
        return graph

    def _make(self, shape: PassShape, numbers: Tensor, layers: tuple[int, ...]) -> _Graph | None:
        # What captures may run the pass first, so the numbers are a real step's.
        buffer = numbers.to(self._decoder.device, copy=True)
        plan = PassPlan.over(buffer, shape)
        try:
            run = self._capture(lambda: self._decoder.run_planned(plan, self._cache, layers))
        except RuntimeError as error:  # CUDA's, out of memory among them
            logger.warning("passes run without graphs from here on: capturing failed: %s", error)
            self._works = False
            self._graphs.clear()
            return None
        return _Graph(buffer, plan, run)


class CudaCapture:
    """Capture with CUDA graphs that share their memory: they never run at the same time."""

    WARM_UPS = 2  # libraries choose kernels and take workspace at their first calls

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(self.WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use CUDA meanwhile: another engine, for one.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def choose_shape(
    pieces: Sequence[Piece], num_logit_rows: int, block_size: int, width: int
) -> PassShape | None:
    """Choose the shape that a step of few rows is padded to; None: it is better run as it is.

    5 requests of 1 to 3 rows, 12 in all, contexts of up to 1000 positions in blocks of 32 -> 8
    pieces of 4 rows and 32 blocks, 32 rows.
    """
    num_rows = sum(piece.num_rows for piece in pieces)
    most_rows = max(piece.num_rows for piece in pieces)
    needed = [-(-piece.length // block_size) for piece in pieces]
    if most_rows > MAX_ROWS_EACH or num_rows > MAX_ROWS or num_logit_rows > num_rows:
        return None
    group = GroupShape(
        num_pieces=_power_of_two(len(pieces)),
        num_rows=_power_of_two(most_rows),
        num_blocks=_round_up(max(*needed, MIN_BLOCKS)),
    )
    if group.num_pieces * group.num_blocks > MAX_WASTE * sum(needed) + FREE_BLOCKS:
        return None  # one long context among short ones
    all_rows = min(group.num_pieces * group.num_rows, max(CHEAP_ROWS, _power_of_two(num_rows)))
    most = fit_pieces(group, block_size, width)
    together = min(group.num_pieces, 1 << (most.bit_length() - 1))
    part = GroupShape(together, group.num_rows, group.num_blocks)
    return PassShape(all_rows, all_rows, (part,) * (group.num_pieces // together))


@dataclass(frozen=True, slots=True)
class _Graph:
    buffer: Tensor  # what the plan is a view of
    plan: PassPlan
    run: Run


def _deal(pieces: Sequence[Piece], groups: Sequence[GroupShape]) -> list[Sequence[Piece]]:
    """Give each group of a shape its pieces, in order; the last ones may have none."""
    size = groups[0].num_pieces
    return [pieces[index * size : (index + 1) * size] for index in range(len(groups))]


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _round_up(count: int) -> int:
    """Round up to 4, 6, 8, 12, 16, 24, ...: steps of a half."""
    power = _power_of_two(count)
    return power * 3 // 4 if count <= power * 3 // 4 else power
