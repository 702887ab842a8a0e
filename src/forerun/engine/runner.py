"""The target on its device with its cache: one pass over a step's tokens. Verifying is no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..model.decoder import Decoder
from ..model.graphs import Capture, CudaCapture, GraphedDecoder
from ..model.layered import LayeredDecoder
from ..types import FeatureSpec, ForwardInput, HiddenStates

__all__ = ["Runner", "TargetRunner"]


class Runner(Protocol):
    """What the engine asks of the target."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def row_cost(self) -> float: ...

    @property
    def pass_s(self) -> float: ...

    def forward(
        self, step: ForwardInput, wanted: FeatureSpec | None = None
    ) -> tuple[Tensor, HiddenStates | None]: ...

    def scrub(self, places: Sequence[tuple[int, int]]) -> None: ...

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...


class TargetRunner:
    """Runs passes and knows nothing of requests."""

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: int,
        block_size: int,
        row_cost: float = 0.0,
        pass_s: float = 0.0,
        capture: Capture | None = None,
    ) -> None:
        """`row_cost` is what one more row adds to a pass, in passes over one row of `pass_s`.

        `capture` makes small passes cheaper to launch (`model.graphs`); CUDA has one of its own.
        """
        self._decoder = decoder
        self.row_cost = row_cost
        self.pass_s = pass_s
        if capture is None and decoder.device.type == "cuda":
            capture = CudaCapture(decoder.device)
        # Padded rows need a place to write: the block after all those that requests may own.
        num_spare = 0 if capture is None else 1
        shape = decoder.cache_shape(block_size)
        self._cache = KVCache(shape, num_blocks + num_spare, decoder.device)
        self._graphed: GraphedDecoder | None = None
        if capture is not None:
            assert isinstance(decoder, LayeredDecoder), "compiled passes are not captured"
            self._graphed = GraphedDecoder(decoder, self._cache, num_blocks, capture)

    @property
    def device(self) -> torch.device:
        """Where steps are to lie: on the host, which plans them and hands them on in one copy."""
        return torch.device("cpu")

    @property
    def vocab_size(self) -> int:
        return self._decoder.config.vocab_size

    @property
    def decoder(self) -> Decoder:
        """The target itself, for drafters that share its weights."""
        return self._decoder

    def forward(
        self, step: ForwardInput, wanted: FeatureSpec | None = None
    ) -> tuple[Tensor, HiddenStates | None]:
        """Compute logits [M, V] float32 of the rows asked for, and the hidden states wanted."""
        if self._graphed is not None:
            return self._graphed.forward(step, wanted)
        if wanted is None:
            return self._decoder.forward(step, self._cache), None
        return self._decoder.forward_with_states(step, self._cache, wanted)

    def scrub(self, places: Sequence[tuple[int, int]]) -> None:
        """Zero (block, from offset) places in which NaN may lie, before somebody reads them."""
        for block, offset in places:
            self._cache.scrub(block, offset)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy what the cache holds in some slots to others: a tree's accepted path."""
        device = self._decoder.device
        self._cache.move(torch.tensor(sources, device=device), torch.tensor(targets, device=device))
