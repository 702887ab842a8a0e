"""An EAGLE head as it runs: who computes its passes, and the choice between them.

A pass takes rows of (token, state): the state of the position before the token, the target's own
where it is known, else the head's. It guesses the state of the token's position, and from it the
next token (EAGLE-1 2401.15077, section 4; EAGLE-3 2503.01840, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..cache.kv_cache import CacheShape, KVCache
from ..model.compiled import CompiledDecoder
from ..model.decoder import Decoder
from ..types import FeatureSpec, ForwardInput
from .config import EagleConfig, Head

__all__ = ["EagleRunner", "HeadPlace", "feature_spec", "load_eagle"]


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """Where a head runs: beside its target."""

    target: Decoder
    num_threads: int
    block_size: int
    max_positions: int  # that a draft may reach


class EagleRunner(Protocol):
    """Runs passes of a head and knows nothing of requests."""

    config: EagleConfig

    def cache_shape(self, block_size: int) -> CacheShape:
        """Say what a cache for this head holds."""
        ...

    def forward(
        self, step: ForwardInput, cache: KVCache, inputs: Tensor, *, of_target: bool
    ) -> tuple[Tensor, Tensor]:
        """Run rows: logits [M, D] float32 over the draft vocabulary, the head's states [N, E].

        `inputs` are the target's states [N, I] (`of_target`; those of several layers side by side)
        or the head's own [N, E], of the positions before the rows' tokens. Positions of the step
        are those of the inputs.
        """
        ...


def feature_spec(config: EagleConfig) -> FeatureSpec:
    """Name the hidden states of the target that a head reads."""
    if config.generation == 1:
        return FeatureSpec(final=True)
    return FeatureSpec(layers=tuple(sorted(set(config.feature_layers))))


def load_eagle(head: Head, place: HeadPlace) -> EagleRunner:
    """Lay a head's weights out for the machine that its target runs on."""
    target = place.target
    if isinstance(target, CompiledDecoder) and _fits_kernels(head.config):
        from .eagle_compiled import CompiledEagle  # here: numba takes a second to import

        return CompiledEagle(head, place)
    from .eagle_layered import LayeredEagle

    return LayeredEagle(head, place)


def head_weight(head: Head, target: Decoder) -> Tensor:  # [D, E]
    """Read the vocabulary projection that a head uses: its own, or rows of the target's."""
    own = head.weights.get("head.weight")
    if own is not None:
        return own
    ids = head.draft_ids
    return target.head_rows(torch.arange(target.config.vocab_size) if ids is None else ids)


def _fits_kernels(config: object) -> bool:
    assert isinstance(config, EagleConfig)
    layer = config.layer
    return (
        layer.head_size % 32 == 0
        and layer.hidden_size % 16 == 0
        and layer.intermediate_size % 16 == 0
        and layer.hidden_size == config.target_hidden_size
    )
