"""What needs an exponential, whole vectors at a time: softmax of scores, the SiLU gate."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vector import (
    F32,
    I16,
    LANES,
    VEC_F32,
    VEC_I32,
    call_lanes,
    fma,
    fold_lanes,
    load_stored,
    load_vector,
    pointer,
    round_bf16,
    splat,
    store_rounded,
    store_vector,
    sum_loop,
)

__all__ = ["LOWEST", "gate", "largest", "soften"]

LOWEST = -3.0e38  # a score that no position has; its weight is exactly zero

LOG2_E = 1.4426950408889634
UNDERFLOW = -126.0  # 2^x below this is taken as zero
# 2^f on [0, 1), minimax of degree 5; relative error 2e-7
POWER_OF_TWO = (0.0018775767, 0.0089893397, 0.055826318, 0.24015361, 0.69315308, 0.99999994)


@intrinsic
def largest(_context, scores, at, count):
    """Find the largest of `count` scores from `at` on; `count` is a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, start, length = args
        row = pointer(context, builder, signature.args[0], array, start, F32)
        lanes = length.type(LANES)

        def body(index: Any, totals: list[Any]) -> list[Any]:
            loaded = load_vector(builder, row, builder.mul(index, lanes))
            return [call_lanes(builder, "maxnum", totals[0], loaded)]

        lowest = ir.Constant(VEC_F32, [LOWEST] * LANES)
        (best,) = sum_loop(builder, builder.udiv(length, lanes), [lowest], body)
        return fold_lanes(builder, best, lambda a, b: call_lanes(builder, "maxnum", a, b))

    return types.float32(scores, types.intp, types.intp), generate


@intrinsic
def soften(_context, scores, at, count, top):
    """Replace `count` scores by exp(score - top) and return their sum; `LOWEST` becomes 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, start, length, highest = args
        row = pointer(context, builder, signature.args[0], array, start, F32)
        lanes, offset = length.type(LANES), splat(builder, highest)

        def body(index: Any, totals: list[Any]) -> list[Any]:
            place = builder.mul(index, lanes)
            weight = exp_lanes(builder, builder.fsub(load_vector(builder, row, place), offset))
            store_vector(builder, weight, row, place)
            return [builder.fadd(totals[0], weight)]

        zero = ir.Constant(VEC_F32, [0.0] * LANES)
        (total,) = sum_loop(builder, builder.udiv(length, lanes), [zero], body)
        return fold_lanes(builder, total, builder.fadd)

    return types.float32(scores, types.intp, types.intp, types.float32), generate


@intrinsic
def gate(_context, gate_up, gate_at, up_at, out, out_at, count):
    """out[i] = silu(gate[i]) * up[i] for `count` stored elements, a multiple of 16.

    Rounded as `gate_up` is stored, whatever `out` is.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, first, second, target, place, length = args
        stored = F32 if signature.args[0].dtype == types.float32 else I16
        gates = pointer(context, builder, signature.args[0], array, first, stored)
        ups = pointer(context, builder, signature.args[0], array, second, stored)
        kept = F32 if signature.args[3].dtype == types.float32 else I16
        outs = pointer(context, builder, signature.args[3], target, place, kept)
        lanes = length.type(LANES)

        def body(index: Any, totals: list[Any]) -> list[Any]:
            at = builder.mul(index, lanes)
            active = silu_lanes(builder, load_stored(builder, gates, at))
            if stored != F32:
                active = round_bf16(builder, active)
            product = builder.fmul(active, load_stored(builder, ups, at))
            if stored != F32:
                product = round_bf16(builder, product)
            store_rounded(builder, product, outs, at)
            return totals

        sum_loop(builder, builder.udiv(length, lanes), [], body)
        return context.get_dummy_value()

    at = types.intp
    return types.void(gate_up, at, at, out, at, at), generate


def silu_lanes(builder: Any, x: Any) -> Any:
    """x * sigmoid(x), by the exponential of -|x| so that nothing overflows."""
    one = ir.Constant(VEC_F32, [1.0] * LANES)
    e = exp_lanes(builder, builder.fneg(call_lanes(builder, "fabs", x)))
    positive = builder.fcmp_ordered(">=", x, ir.Constant(VEC_F32, [0.0] * LANES))
    numerator = builder.select(positive, one, e)
    return builder.fmul(x, builder.fdiv(numerator, builder.fadd(one, e)))


def exp_lanes(builder: Any, x: Any) -> Any:
    """exp(x) of a vector, for x <= 0: 2^whole * 2^fraction, zero where it would be denormal."""

    def constant(value: float) -> Any:
        return ir.Constant(VEC_F32, [value] * LANES)

    scaled = builder.fmul(x, constant(LOG2_E))
    tiny = builder.fcmp_ordered("<", scaled, constant(UNDERFLOW))
    scaled = builder.select(tiny, constant(UNDERFLOW), scaled)
    whole = call_lanes(builder, "floor", scaled)
    fraction = builder.fsub(scaled, whole)
    power = constant(POWER_OF_TWO[0])
    for coefficient in POWER_OF_TWO[1:]:
        power = fma(builder, power, fraction, constant(coefficient))
    exponent = builder.add(builder.fptosi(whole, VEC_I32), VEC_I32([127] * LANES))
    scale = builder.bitcast(builder.shl(exponent, VEC_I32([23] * LANES)), VEC_F32)
    return builder.select(tiny, constant(0.0), builder.fmul(power, scale))
