"""Bits to booleans: masks as the compiler packs them, as rows over the vocabulary."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["num_words", "pack_masks", "unpack_masks"]


def num_words(vocab_size: int) -> int:
    """Count the 32-bit words that hold one bit per token."""
    return (vocab_size + 31) // 32


def pack_masks(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:  # [M, V] -> [M, W]
    """Pack rows of booleans, token t at bit t % 32 of word t // 32."""
    rows, vocab_size = allowed.shape
    padded = np.zeros((rows, 32 * num_words(vocab_size)), dtype=np.bool_)
    padded[:, :vocab_size] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32, copy=False)


def unpack_masks(masks: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Turn packed rows [M, W] into booleans [M, V]: which tokens are allowed."""
    packed = np.ascontiguousarray(masks, dtype="<i4").view(np.uint8)  # [M, 4 W]
    bits = np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)
