"""A decoder with the tensors of its cache, captured passes where those are cheaper to launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..types import FeatureSpec, ForwardInput, HiddenStates
from .decoder import Decoder
from .graphs import Capture, CudaCapture, GraphedDecoder
from .layered import LayeredDecoder

__all__ = ["CachedDecoder"]


class CachedDecoder:
    """Runs passes and knows nothing of requests."""

    def __init__(
        self, decoder: Decoder, num_blocks: int, block_size: int, capture: Capture | None = None
    ) -> None:
        """`capture` makes small passes cheaper to launch (`graphs`); CUDA has one of its own."""
        self.decoder = decoder
        if capture is None and decoder.device.type == "cuda":
            capture = CudaCapture(decoder.device)
        # Padded rows need a place to write: the block after all those that requests may own.
        num_spare = 0 if capture is None else 1
        shape = decoder.cache_shape(block_size)
        self.cache = KVCache(shape, num_blocks + num_spare, decoder.device)
        self._graphed: GraphedDecoder | None = None
        if capture is not None:
            assert isinstance(decoder, LayeredDecoder), "compiled passes are not captured"
            self._graphed = GraphedDecoder(decoder, self.cache, num_blocks, capture)

    def forward(
        self, step: ForwardInput, wanted: FeatureSpec | None = None
    ) -> tuple[Tensor, HiddenStates | None]:
        """Compute logits [M, V] float32 of the rows asked for, and the hidden states wanted."""
        if self._graphed is not None:
            return self._graphed.forward(step, wanted)
        if wanted is None:
            return self.decoder.forward(step, self.cache), None
        return self.decoder.forward_with_states(step, self.cache, wanted)

    def scrub(self, block: int, offset: int) -> None:
        """Zero a block from an offset on, where NaN may lie."""
        self.cache.scrub(block, offset)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy what the cache holds in some slots to others."""
        device = self.decoder.device
        self.cache.move(torch.tensor(sources, device=device), torch.tensor(targets, device=device))
