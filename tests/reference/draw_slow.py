"""Slow twin of `forerun.kernels.draw`: one row, numpy's float32, sorts and Python integers.

Shares no code with the package, but the same definition of odds, step by step: so weights and
tokens must be equal, not near.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNIT = 2**42
POLYNOMIAL = [0.6931471824645996, 0.24022647738456726, 0.055503323674201965,
              0.00961843691766262, 0.0013398875016719103, 0.00015353360504377633]  # fmt: skip

Row = NDArray[np.float32]


def odds_of(row: Row, temperature: float) -> Row:
    """2^((x - top) * log2(e) / temperature), each operation rounded to float32."""
    f32 = np.float32
    c = [f32(each) for each in POLYNOMIAL]
    rate = f32(1.4426950408889634 / float(f32(temperature)))
    with np.errstate(over="ignore", invalid="ignore"):
        power = np.fmax((row - row.max()) * rate, f32(-64))
    n = np.rint(power)
    f = power - n
    square = f * f
    low, middle = f * c[0] + f32(1), f * c[2] + c[1]
    high = (f * c[4] + c[3]) + square * c[5]
    value = (low + square * middle) + (square * square) * high
    return np.ldexp(value, n.astype(np.int32)).astype(np.float32)


def weights_of(row: Row, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Filter one row in the documented order; the result is whole numbers."""
    if temperature == 0:
        return [UNIT if i == int(row.argmax()) else 0 for i in range(len(row))]
    odds = odds_of(row, temperature)
    alive = odds >= np.float32(min_p)
    if 0 < top_k < len(row):
        alive &= row >= np.sort(row)[-top_k]
    weights = [
        int(each * UNIT) if keep else 0 for each, keep in zip(odds.tolist(), alive, strict=True)
    ]
    if top_p < 1:
        needed = top_p * float(sum(weights))
        falling = sorted(weights, reverse=True)
        sums = itertools.accumulate(falling)
        cut = next(
            each for each, total in zip(falling, sums, strict=True) if float(total) >= needed
        )
        weights = [each if each >= cut else 0 for each in weights]
    return weights


def token_at(weights: list[int], uniform: float) -> int:
    """Find the column that holds the fraction `uniform` of the sum."""
    total = sum(weights)
    point = min(math.floor(uniform * float(total)), total - 1)
    sums = itertools.accumulate(weights)
    return next(column for column, each in enumerate(sums) if each > point)


def crossing_of(values: list[float], weight: Any, needed: float) -> float:
    """Find the largest of the values down to which `needed` is gathered."""
    return max(c for c in values if float(sum(weight(v) for v in values if v >= c)) >= needed)
