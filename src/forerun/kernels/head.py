"""Passes of draft heads beside what `forward` does: a projection alone, and Medusa's heads.

An EAGLE head's layer is a decoder's and runs as one, so that a machine compiles little for a head
that it has not compiled for a model.
"""

from __future__ import annotations

import math

import numpy as np

from .compiling import compiled
from .phases import matrix_phase
from .team import finish, take
from .vector import settle, widen

__all__ = ["matrix_pass", "medusa_pass"]


@compiled(fast=False)
def matrix_pass(x, packed, bias, no_scales, out, counters):
    """out = x W^T + b for x [N, inputs] float32; packed [1, ...] in panels; counters [1, 16]."""
    matrix_phase(
        counters, 0, x, no_scales[0], x.shape[0], packed, no_scales, 0, bias, out, out.shape[1]
    )


@compiled(fast=False)
def medusa_pass(x, blocks, biases, head, head_bias, no_scales, sums, rows, logits, counters):
    """Run residual blocks of some heads over the same rows, then one vocabulary for all of them.

    x [N, E] float32, what the target's vocabulary projection read; blocks [H * B, ...] in panels,
    head by head; sums [N, E] as stored; rows [H * N, E] float32, the blocks' results head by head;
    counters [(2 * B) * H + 1, 16].
    """
    num_rows, width = x.shape[0], x.shape[1]
    num_heads = rows.shape[0] // num_rows
    num_blocks = blocks.shape[0] // num_heads
    phase = 0
    for i in range(num_heads):
        first = i * num_rows
        own = rows[first : first + num_rows]
        for b in range(num_blocks):
            source = x if b == 0 else own
            matrix_phase(
                counters, phase, source, no_scales[0], num_rows, blocks, no_scales,
                i * num_blocks + b, biases, sums, width,
            )  # fmt: skip
            parts, mine = num_rows, 0
            part = take(counters, phase + 1)
            while part < parts:
                for k in range(width):
                    z = widen(sums[part, k])
                    active = settle(z / (np.float32(1) + np.float32(math.exp(-z))), sums)
                    own[part, k] = settle(source[part, k] + active, sums)
                mine += 1
                part = take(counters, phase + 1)
            finish(counters, phase + 1, mine, parts)
            phase += 2
    matrix_phase(
        counters, phase, rows, no_scales[0], rows.shape[0], head, no_scales, 0, head_bias, logits,
        logits.shape[1],
    )  # fmt: skip
