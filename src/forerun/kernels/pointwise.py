"""Norms and activations of the CPU path, each one pass over its rows.

Rounding follows the published models: a norm is computed in float32, rounded to the storage
format, then multiplied by its weight; the activation is rounded before it is multiplied.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from .compiling import compiled
from .softmax import gate
from .vector import narrow, widen

__all__ = ["add_norm", "exp_negative", "silu_multiply", "silu_multiply_parallel"]

# 2^f on [0, 1), minimax of degree 5; relative error 2e-7
_POWER = (0.0018775767, 0.0089893397, 0.055826318, 0.24015361, 0.69315308, 0.99999994)
_LOG2_E = np.float32(1.4426950408889634)
_SMALLEST = np.float32(-126.0)


@intrinsic
def _power_of_two(_context, exponent):
    """2^exponent as float32 for a whole exponent from -126 to 127, by writing its bits."""

    def generate(context, builder, signature, args):
        integer = ir.IntType(32)
        bits = builder.shl(builder.add(args[0], integer(127)), integer(23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), generate


@njit(inline="always")
def exp_negative(x):
    """exp(x) for x <= 0 in float32, without a library call, so that loops vectorise."""
    y = max(np.float32(x) * _LOG2_E, _SMALLEST)
    whole = np.float32(math.floor(y))
    f = y - whole
    p = np.float32(_POWER[0]) * f + np.float32(_POWER[1])
    p = p * f + np.float32(_POWER[2])
    p = p * f + np.float32(_POWER[3])
    p = p * f + np.float32(_POWER[4])
    p = p * f + np.float32(_POWER[5])
    return _power_of_two(np.int32(whole)) * p


@compiled()
def add_norm(x, y, weight, out, eps):
    """x += y; out = RMSNorm(x) * weight. x, y, out [N, E] in the storage format."""
    num_rows, width = x.shape
    for t in range(num_rows):
        total = np.float32(0)
        for i in range(width):
            x[t, i] = narrow(widen(x[t, i]) + widen(y[t, i]), x)
            h = widen(x[t, i])
            total += h * h
        scale = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(width) + eps))
        for i in range(width):
            normed = widen(narrow(widen(x[t, i]) * scale, out))
            out[t, i] = narrow(normed * widen(weight[i]), out)


@compiled()
def silu_multiply(gate_up, out):
    """out = silu(gate) * up for gate_up [N, 2F] -> out [N, F]; F is a multiple of 16."""
    num_rows, width = out.shape
    for t in range(num_rows):
        gate(gate_up, 2 * width * t, 2 * width * t + width, out, width * t, width)


@compiled(parallel=True)
def silu_multiply_parallel(gate_up, out):
    """Do what `silu_multiply` does, over all threads: worth it for a piece of a prompt."""
    num_rows, width = out.shape
    for t in prange(num_rows):
        gate(gate_up, 2 * width * t, 2 * width * t + width, out, width * t, width)
