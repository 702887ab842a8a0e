"""What lies between the linear layers of a decoder: the contract, and its plain torch form.

Two implementations compute the same: `TorchOps` here, on any device, readable, the reference;
`NumbaOps` in `numba_ops`, compiled for the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..cache.kv_cache import KVCache
from ..types import ForwardInput

__all__ = ["AttentionShape", "Ops", "Rotary", "TorchOps"]


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


class TorchOps:
    """The contract in plain torch: any device, any format, one request at a time."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._step: _TorchStep | None = None

    def prepare(self, step: ForwardInput, cache: KVCache) -> None:
        self._step = _TorchStep.build(step, cache, self._rotary)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return scaled.to(x.dtype) * weight

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        x += y
        return self.norm(x, weight, eps)

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def attend(self, layer: int, shape: AttentionShape, qkv: Tensor) -> Tensor:
        step = self._step
        assert step is not None, "prepare() comes first"
        num_tokens, size, groups = qkv.shape[0], shape.head_size, shape.num_kv_heads
        heads = qkv.view(num_tokens, -1, size)  # [N, H + 2G, D]
        queries, keys, values = heads.split([shape.num_heads, groups, groups], dim=1)
        if shape.q_norm is not None and shape.k_norm is not None:
            queries = self.norm(queries, shape.q_norm, shape.norm_eps)
            keys = self.norm(keys, shape.k_norm, shape.norm_eps)
        queries, keys = step.rotate(queries), step.rotate(keys)
        step.cache.write(layer, step.blocks, step.offsets, keys, values)
        mixed = torch.empty_like(queries)  # [N, H, D]
        for request in step.requests:
            all_keys, all_values = step.cache.gather(layer, request.blocks, request.length)
            result = functional.scaled_dot_product_attention(
                queries[request.rows].transpose(0, 1).unsqueeze(0),  # [1, H, T, D]
                all_keys.unsqueeze(0),  # [1, G, length, D]
                all_values.unsqueeze(0),
                attn_mask=request.mask(shape.window),
                enable_gqa=shape.num_heads != groups,
            )
            mixed[request.rows] = result[0].transpose(0, 1)
        return mixed.view(num_tokens, -1)


@dataclass(frozen=True, slots=True)
class _TorchRequest:
    rows: slice  # its tokens in the step
    positions: Tensor  # [T]
    blocks: Tensor  # [n] int64, the blocks that hold `length` positions
    length: int  # positions after this step

    def mask(self, window: int | None) -> Tensor | None:
        """[T, length] bool, true where a token may look; None where it may look everywhere."""
        if len(self.positions) == 1 and (window is None or window >= self.length):
            return None
        seen = torch.arange(self.length, device=self.positions.device)
        mask = seen <= self.positions.unsqueeze(1)
        if window is not None:
            mask &= seen > self.positions.unsqueeze(1) - window
        return mask


@dataclass(frozen=True, slots=True)
class _TorchStep:
    cache: KVCache
    cos: Tensor  # [N, 1, D / 2]
    sin: Tensor
    blocks: Tensor  # [N] block of each token
    offsets: Tensor  # [N] offset of each token in its block
    requests: tuple[_TorchRequest, ...]

    @staticmethod
    def build(step: ForwardInput, cache: KVCache, rotary: Rotary) -> _TorchStep:
        size = cache.shape.block_size
        counts = step.starts.diff()
        owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        bounds = step.starts.tolist()
        requests = []
        for index, (first, end) in enumerate(pairwise(bounds)):
            length = int(step.positions[end - 1]) + 1
            blocks = step.block_tables[index, : -(-length // size)]
            rows = slice(first, end)
            requests.append(_TorchRequest(rows, step.positions[rows], blocks, length))
        return _TorchStep(
            cache=cache,
            cos=rotary.cos[step.positions].unsqueeze(1),
            sin=rotary.sin[step.positions].unsqueeze(1),
            blocks=step.block_tables[owner, step.positions // size],
            offsets=step.positions % size,
            requests=tuple(requests),
        )

    def rotate(self, heads: Tensor) -> Tensor:  # [N, heads, D] -> the same
        first, second = heads.float().chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(rotated, dim=-1).to(heads.dtype)
