"""The target on its device with its cache: one pass over a step's tokens. Verifying is no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..model.cached import CachedDecoder
from ..model.decoder import Decoder
from ..model.graphs import Capture
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
        self._passes = CachedDecoder(decoder, num_blocks, block_size, capture)
        self.row_cost = row_cost
        self.pass_s = pass_s

    @property
    def device(self) -> torch.device:
        """Where steps are to lie: on the host, which plans them and hands them on in one copy."""
        return torch.device("cpu")

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    @property
    def decoder(self) -> Decoder:
        """The target itself."""
        return self._passes.decoder

    def forward(
        self, step: ForwardInput, wanted: FeatureSpec | None = None
    ) -> tuple[Tensor, HiddenStates | None]:
        """Compute logits [M, V] float32 of the rows asked for, and the hidden states wanted."""
        return self._passes.forward(step, wanted)

    def scrub(self, places: Sequence[tuple[int, int]]) -> None:
        """Zero (block, from offset) places in which NaN may lie, before somebody reads them."""
        for block, offset in places:
            self._passes.scrub(block, offset)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy what the cache holds in some slots to others: a tree's accepted path."""
        self._passes.move(sources, targets)
