"""What lies between the linear layers, compiled for the CPU by numba. The twin of `TorchOps`.

Tensors and compiled code share memory: bfloat16 tensors pass as their bits. Kernels are
compiled once per machine and number format and kept on disk.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..kernels import attention, pointwise
from ..kernels.pool import POOL
from ..types import ForwardInput
from .arrays import EVERYTHING, Array, StepPlan, plan_step, view, view_optional
from .ops import AttentionShape, Rotary

__all__ = ["NumbaOps"]

# From how many rows on a kernel is worth waking the other threads. Fewer parallel sections are also
# kinder where processors are shared: each of them waits for its slowest thread.
PARALLEL_ROWS = 33


class NumbaOps:
    """Compiled kernels over numpy views of the tensors. One step at a time."""

    def __init__(self, rotary: Rotary, shape: AttentionShape, num_threads: int) -> None:
        self._cos, self._sin = rotary.cos.numpy(), rotary.sin.numpy()
        self._shape = shape
        self._step: StepPlan | None = None
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
        self._step = plan_step(step, groups, share, size)

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
                shape.window or EVERYTHING, step.branch_at, step.paths,
                step.partial, step.tops, step.totals,
            )  # fmt: skip
            merge(
                step.units, step.token_units, shape.num_kv_heads,
                shape.num_heads // shape.num_kv_heads, step.partial, step.tops, step.totals,
                view(out),
            )  # fmt: skip
        return out
