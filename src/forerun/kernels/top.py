"""The likeliest entries of rows of logits and what their exponentials add up to: for drafts.

One scan finds the few largest, another adds up. Where anything is NaN or infinite the sum is NaN.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .compiling import FAST, compiled
from .pointwise import exp_negative

__all__ = ["likeliest"]


@njit(fastmath=FAST, nogil=True)
def _sum_exp(row, width, top):
    """Sum exp(row - top); NaN if anything in the row is no number."""
    total, spoilt = np.float32(0), np.float32(0)
    for i in range(width):
        total += exp_negative(row[i] - top)
        spoilt += row[i] * np.float32(0)  # NaN for NaN and infinity
    return total + spoilt


@compiled(fast=False)
def likeliest(logits, width, values, indexes, totals):
    """Fill values, indexes [M, k]: the largest of logits[:, :width], falling; of equals the first.

    totals [M] float32: the sums of exp(logit - largest).
    """
    count = values.shape[1]
    for m in range(logits.shape[0]):
        row = logits[m]
        for k in range(count):
            values[m, k] = -np.inf
            indexes[m, k] = 0
        least = np.float32(-np.inf)
        for i in range(width):
            if row[i] > least:
                k = count - 1
                while k > 0 and values[m, k - 1] < row[i]:
                    values[m, k], indexes[m, k] = values[m, k - 1], indexes[m, k - 1]
                    k -= 1
                values[m, k], indexes[m, k] = row[i], i
                least = values[m, count - 1]
        totals[m] = _sum_exp(row, width, values[m, 0])
