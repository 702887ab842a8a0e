"""The tensors behind the cache blocks: write a step's keys and values, gather a request's.

Layout, chosen for the vector kernels (glossary letters: G KV heads, D head size):

    keys    [L, blocks, G, D / pack, block_size, pack]     a vector runs over positions
    values  [L, blocks, G, block_size / pack, D, pack]     a vector runs over the head's elements

`pack` is 2 for 16-bit formats, whose multiply-add instructions take pairs, and 1 for float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["CacheShape", "KVCache"]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What determines the size of a cache."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype

    @property
    def pack(self) -> int:
        return 2 if self.dtype.itemsize == 2 else 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values together."""
        elements = self.num_layers * self.num_kv_heads * self.head_size * self.block_size
        return 2 * elements * self.dtype.itemsize


class KVCache:
    """Keys and values of every layer for a fixed number of blocks."""

    def __init__(self, shape: CacheShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        pack, size, block = shape.pack, shape.head_size, shape.block_size
        lead = (shape.num_layers, num_blocks, shape.num_kv_heads)
        self.keys = _zeros((*lead, size // pack, block, pack), shape.dtype, device)
        self.values = _zeros((*lead, block // pack, size, pack), shape.dtype, device)

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Store N positions. `blocks`, `offsets` [N] int64; `keys`, `values` [N, G, D]."""
        pack = self.shape.pack
        num_tokens, groups, size = keys.shape
        self.keys[layer, blocks, :, :, offsets] = keys.reshape(
            num_tokens, groups, size // pack, pack
        )
        self.values[layer, blocks, :, offsets // pack, :, offsets % pack] = values

    def gather(self, layer: int, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Read a request's first `length` positions: two [G, length, D] from its `blocks` [n]."""
        groups, size = self.shape.num_kv_heads, self.shape.head_size
        keys = self.keys[layer, blocks]  # [n, G, D/pack, block, pack]
        keys = keys.permute(1, 0, 3, 2, 4).reshape(groups, -1, size)  # [G, n * block, D]
        values = self.values[layer, blocks]  # [n, G, block/pack, D, pack]
        values = values.permute(1, 0, 2, 4, 3).reshape(groups, -1, size)  # [G, n * block, D]
        return keys[:, :length], values[:, :length]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy positions of all layers: slots [n] int64, block * block_size + offset, to slots."""
        size, pack = self.shape.block_size, self.shape.pack
        blocks, offsets = sources // size, sources % size
        new_blocks, new_offsets = targets // size, targets % size
        # All are read before any is written: a source may be the target of another.
        keys = self.keys[:, blocks, :, :, offsets]
        values = self.values[:, blocks, :, offsets // pack, :, offsets % pack]
        self.keys[:, new_blocks, :, :, new_offsets] = keys
        self.values[:, new_blocks, :, new_offsets // pack, :, new_offsets % pack] = values

    def scrub(self, block: int, offset: int) -> None:
        """Zero a block's values from `offset` on, where NaN may lie.

        Keys may stay: scores of positions that a row does not see are overwritten, but values are
        multiplied by a weight of zero, and zero times NaN is NaN.
        """
        pack = self.shape.pack
        self.values[:, block, :, -(-offset // pack) :] = 0
        if offset % pack:
            self.values[:, block, :, offset // pack, :, offset % pack :] = 0


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make zeros that cost no memory on the CPU until they are written.

    Zeros, not empty: a kernel may multiply a stale position by a weight of zero, and zero times
    NaN is NaN. `torch.zeros` writes every page; numpy asks the system for pages that are zero.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    bits = np.zeros(size, np.int16 if dtype.itemsize == 2 else np.float32)
    return torch.from_numpy(bits).view(dtype)
