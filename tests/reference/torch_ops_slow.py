"""Slow twin of `TorchOps`: attention one request after the other, over exactly what it sees.

No padding, no groups, no plan. Rotation and norms are written out anew.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from forerun.cache.kv_cache import KVCache
from forerun.model.ops import AttentionShape, Rotary
from forerun.types import ForwardInput


class LoopOps:
    """`prepare` and `attend` of the contract."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary

    def prepare(self, step: ForwardInput, cache: KVCache) -> None:
        self._step, self._cache = step, cache

    def attend(self, layer: int, shape: AttentionShape, qkv: Tensor) -> Tensor:
        cache, tables = self._cache, self._step.block_tables
        size, block = shape.head_size, cache.shape.block_size
        heads = qkv.view(len(qkv), -1, size)  # [N, H + 2G, D]
        queries, keys, values = heads.split(
            [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1
        )
        if shape.q_norm is not None:
            queries = _norm(queries, shape.q_norm, shape.norm_eps)
            keys = _norm(keys, shape.k_norm, shape.norm_eps)
        positions = self._step.positions
        queries, keys = self._rotate(queries, positions), self._rotate(keys, positions)
        mixed = torch.full_like(queries, torch.nan)
        for request, (first, end) in enumerate(pairwise(self._step.starts.tolist())):
            own = positions[first:end]
            cache.write(
                layer,
                tables[request, own // block],
                own % block,
                keys[first:end],
                values[first:end],
            )
            length = int(own[-1]) + 1
            blocks = tables[request, : -(-length // block)]
            all_keys, all_values = cache.gather(layer, blocks, length)  # [G, length, D]
            seen = torch.arange(length)
            mask = seen <= own.unsqueeze(1)
            if shape.window is not None:
                mask &= seen > own.unsqueeze(1) - shape.window
            result = functional.scaled_dot_product_attention(
                queries[first:end].transpose(0, 1).unsqueeze(0),  # [1, H, T, D]
                all_keys.unsqueeze(0),
                all_values.unsqueeze(0),
                attn_mask=mask,
                enable_gqa=shape.num_heads != shape.num_kv_heads,
            )
            mixed[first:end] = result[0].transpose(0, 1)
        return mixed.view(len(qkv), -1)

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:  # [N, heads, D] -> the same
        half = heads.shape[-1] // 2
        cos = self._rotary.cos[positions].repeat(1, 2).unsqueeze(1)
        sin = self._rotary.sin[positions].repeat(1, 2).unsqueeze(1)
        wide = heads.float()
        turned = torch.cat([-wide[..., half:], wide[..., :half]], -1)
        return (wide * cos + turned * sin).to(heads.dtype)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scaled = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled.to(x.dtype) * weight
