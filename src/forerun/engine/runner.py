"""The target on its device with its cache: one pass over a step's tokens. Verifying is no more."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..model.decoder import Decoder
from ..types import ForwardInput

__all__ = ["TargetRunner"]


class TargetRunner:
    """Runs passes and knows nothing of requests."""

    def __init__(
        self, decoder: Decoder, num_blocks: int, block_size: int, row_cost: float = 0.0
    ) -> None:
        """`row_cost` is what one more row adds to a pass, in passes over one row."""
        self._decoder = decoder
        self.row_cost = row_cost
        self._cache = KVCache(decoder.cache_shape(block_size), num_blocks, decoder.device)

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    @property
    def vocab_size(self) -> int:
        return self._decoder.config.vocab_size

    def forward(self, step: ForwardInput) -> tuple[Tensor, Tensor | None]:
        """Compute logits [M, V] float32 of the rows asked for, and features: none so far."""
        return self._decoder.forward(step, self._cache), None

    def scrub(self, places: Sequence[tuple[int, int]]) -> None:
        """Zero (block, from offset) places in which NaN may lie, before somebody reads them."""
        for block, offset in places:
            self._cache.scrub(block, offset)
