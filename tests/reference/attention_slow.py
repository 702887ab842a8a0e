"""Slow twin of the compiled kernels: plain numpy, float64, one row at a time.

Shares no code with the package. bfloat16 is float64 rounded to eight bits of significand.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def round_bf16(values: Array) -> Array:
    """Round to bfloat16, to nearest, ties to even; the result is float64."""
    mantissa, exponent = np.frexp(np.asarray(values, np.float64))
    rounded: Array = np.ldexp(np.rint(mantissa * 256.0), exponent - 8)
    return rounded


def bf16_bits(values: Array) -> Array:
    """Encode values as bfloat16, rounded to nearest."""
    exact = round_bf16(values).astype(np.float32)
    return (exact.view(np.uint32) >> 16).astype(np.uint16)


def from_bits(stored: Array) -> Array:
    """Decode bfloat16 bits, or float32, to float64."""
    if stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def norm_row(x: Array, weight: Array, eps: float, rounds: bool) -> Array:
    """RMSNorm of one row, rounded before its weight where the format does, and not after it."""
    normed = x / math.sqrt(float(np.mean(x * x)) + eps)
    return (round_bf16(normed) if rounds else normed) * weight


def silu_multiply_row(gate: Array, up: Array, rounds: bool) -> Array:
    """silu(gate) * up, the activation rounded first where the format does."""
    with np.errstate(over="ignore"):
        active = gate / (1.0 + np.exp(-gate))
    return (round_bf16(active) if rounds else active) * up


def rotate_head(head: Array, position: int, frequencies: Array) -> Array:
    """Turn one head's pairs (i, D/2 + i) by position * frequency (2104.09864, section 3.2)."""
    half = len(head) // 2
    turned = np.empty(len(head))
    for i in range(half):
        pair = complex(head[i], head[half + i]) * np.exp(1j * position * frequencies[i])
        turned[i], turned[half + i] = pair.real, pair.imag
    return turned


def attend_row(query: Array, keys: Array, values: Array, position: int, window: int) -> Array:
    """Attention of one query, already scaled, over keys and values [length, D] it may see."""
    oldest = max(0, position + 1 - window)
    scores = keys[oldest : position + 1] @ query
    weights = np.exp(scores - scores.max())
    mixed: Array = (weights / weights.sum()) @ values[oldest : position + 1]
    return mixed
