"""What is done to one row of a pass: looked up in the table, normed."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from .compiling import FAST
from .matrix import PANEL
from .vector import narrow, settle, widen

__all__ = ["embed_token", "norm_row"]


@njit(fastmath=FAST, nogil=True)
def norm_row(x, t, weights, layer, eps, out, row):
    """out[row] = RMSNorm(x[t]) * weights[layer], rounded as x is stored."""
    width = x.shape[1]
    total = np.float32(0)
    for i in range(width):
        value = widen(x[t, i])
        total += value * value
    scale = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(width) + eps))
    for i in range(width):
        normed = settle(widen(x[t, i]) * scale, x)
        out[row, i] = settle(normed * widen(weights[layer, i]), x)


@njit(nogil=True)
def embed_token(token, table, scales, x, t):
    """Read a token's row from panels, in which it is one lane of many vectors."""
    panel, lane = token // PANEL, token % PANEL
    width = x.shape[1]
    if table.shape[3] == 2 * PANEL:  # whole numbers of 8 bits, in pairs
        scale = scales[0, token]
        for i in range(width):
            value = np.float32(table[0, panel, i // 2, 2 * lane + i % 2]) * scale
            x[t, i] = narrow(np.float32(value), x)
    elif table.shape[2] * 2 == width:  # two inputs in one number
        for i in range(table.shape[2]):
            pair = np.uint32(table[0, panel, i, lane])
            x[t, 2 * i] = narrow(widen(np.uint16(pair & np.uint32(0xFFFF))), x)
            x[t, 2 * i + 1] = narrow(widen(np.uint16(pair >> np.uint32(16))), x)
    else:
        for i in range(width):
            x[t, i] = narrow(np.float32(table[0, panel, i, lane]), x)
