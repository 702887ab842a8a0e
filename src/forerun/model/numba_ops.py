"""What lies between the linear layers, compiled for the CPU by numba. The twin of `TorchOps`.

Tensors and compiled code share memory: bfloat16 tensors pass as their bits. Kernels are
compiled once per machine and number format and kept on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..kernels import attention, pointwise
from ..kernels.pool import POOL
from ..kernels.tiles import KEY_BLOCK, TILE_ROWS
from ..types import ForwardInput
from .ops import AttentionShape, Rotary

__all__ = ["NumbaOps"]

UNIT_TOKENS = 64  # tokens of one request that share a unit of attention work
# From how many rows on a kernel is worth waking the other threads. Fewer parallel sections are also
# kinder where processors are shared: each of them waits for its slowest thread.
PARALLEL_ROWS = 33
EVERYTHING = 1 << 40  # a window that no context exceeds

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Step:
    positions: Array  # [N]
    slots: Array  # [N]
    tables: Array  # [B, max_blocks]
    units: Array
    token_units: Array
    queries: Array  # scratch, see kernels.attention
    partial: Array
    tops: Array
    totals: Array


class NumbaOps:
    """Compiled kernels over numpy views of the tensors. One step at a time."""

    def __init__(self, rotary: Rotary, shape: AttentionShape, num_threads: int) -> None:
        self._cos, self._sin = rotary.cos.numpy(), rotary.sin.numpy()
        self._shape = shape
        self._step: _Step | None = None
        self._cache: KVCache | None = None
        self._layers: list[tuple[Array, Array]] = []
        self._num_threads = min(num_threads, int(numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]

    def prepare(self, step: ForwardInput, cache: KVCache) -> None:
        numba.set_num_threads(self._num_threads)  # a setting of the calling thread
        if cache is not self._cache:
            self._cache = cache
            self._layers = [
                (view(keys), view(values))
                for keys, values in zip(cache.keys, cache.values, strict=True)
            ]
        groups, size = self._shape.num_kv_heads, self._shape.head_size
        share = self._shape.num_heads // groups
        positions, starts = step.positions.numpy(), step.starts.numpy()
        tables = step.block_tables.numpy()
        owner = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        slots = tables[owner, positions // KEY_BLOCK] * KEY_BLOCK + positions % KEY_BLOCK
        units, token_units, num_rows = attention.plan_units(
            starts, positions, share, groups, UNIT_TOKENS
        )
        # The last tile of a head's rows may read beyond them: four rows of padding.
        queries = np.zeros((groups, len(positions) * share + TILE_ROWS, size), np.float32)
        partial = np.empty((num_rows, size), np.float32)
        tops, totals = np.empty(num_rows, np.float32), np.empty(num_rows, np.float32)
        self._step = _Step(
            positions, slots, tables, units, token_units, queries, partial, tops, totals
        )

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.add_norm(x.clone(), torch.zeros_like(x), weight, eps)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        pointwise.add_norm(view(x), view(y), view(weight), view(out), np.float32(eps))
        return out

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        rows, double = gate_up.shape
        out = gate_up.new_empty(rows, double // 2)
        many = rows >= PARALLEL_ROWS and self._num_threads > 1
        kernel = pointwise.silu_multiply_parallel if many else pointwise.silu_multiply
        with POOL:
            kernel(view(gate_up), view(out))
        return out

    def attend(self, layer: int, shape: AttentionShape, qkv: Tensor) -> Tensor:
        step = self._step
        assert step is not None, "prepare() comes first"
        keys, values = self._layers[layer]
        out = qkv.new_empty(qkv.shape[0], shape.num_heads * shape.head_size)
        many = qkv.shape[0] >= PARALLEL_ROWS and self._num_threads > 1
        rotate = attention.rotate_parallel if many else attention.rotate
        merge = attention.merge_parallel if many else attention.merge
        with POOL:
            rotate(
                view(qkv), self._cos, self._sin, view_optional(shape.q_norm, qkv),
                view_optional(shape.k_norm, qkv), np.float32(shape.norm_eps), step.positions,
                step.slots, keys, values, step.queries,
            )  # fmt: skip
            attention.attend(
                step.queries, keys, values, step.tables, step.positions, step.units,
                shape.window or EVERYTHING, step.partial, step.tops, step.totals,
            )  # fmt: skip
            merge(
                step.units, step.token_units, shape.num_kv_heads,
                shape.num_heads // shape.num_kv_heads, step.partial, step.tops, step.totals,
                view(out),
            )  # fmt: skip
        return out


def view(tensor: Tensor) -> Array:
    """See a CPU tensor as a numpy array without a copy; bfloat16 as its bits."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy()
    return array


def view_optional(tensor: Tensor | None, like: Tensor) -> Array:
    """The same for weights that a model may lack: an empty array then."""
    return view(like.new_empty(0) if tensor is None else tensor)
