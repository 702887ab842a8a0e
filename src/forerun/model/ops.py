"""What lies between the linear layers of a decoder: the contract.

Two implementations compute the same: `TorchOps` in `torch_ops`, on any device; `NumbaOps` in
`numba_ops`, compiled for the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..types import ForwardInput

__all__ = ["AttentionShape", "Ops", "Rotary"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosines and sines of every position's rotation, [positions, D / 2] float32."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def from_frequencies(inverse: Tensor, num_positions: int) -> Rotary:
        """Tabulate rotations from inverse frequencies [D / 2] (RoPE, 2104.09864, section 3.2)."""
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse.float())
        return Rotary(angles.cos(), angles.sin())


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention, beside its linear layers."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None  # positions that a token sees, itself included; None: all
    q_norm: Tensor | None  # [D] weights, for models that norm their queries and keys
    k_norm: Tensor | None
    norm_eps: float


class Ops(Protocol):
    """What lies between linear layers. `prepare` is called once a step, before the rest."""

    def prepare(self, step: ForwardInput, cache: KVCache) -> None:
        """Take notice of a step's tokens; what all layers share is computed here."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of x [N, E]."""

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add y to x in place, then RMSNorm the sum."""

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for [N, 2F] -> [N, F]."""

    def attend(self, layer: int, shape: AttentionShape, qkv: Tensor) -> Tensor:
        """Rotate, store keys and values, attend: [N, (H + 2G) * D] -> [N, H * D]."""
