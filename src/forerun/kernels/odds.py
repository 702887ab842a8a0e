"""Vector pieces of filtering and drawing: each works on a group of 64 columns of a row.

The odds of a column are 2^((x - top) * rate), 1 for the row's largest logit; its weight is
floor(odds * 2^42). Both are defined here by float32 additions, multiplications and roundings only,
none of them fused, so that every processor, and numpy in the slow twin, gives the same bits. The
relative error of odds is below 1.3e-7 * (1 + |log2(odds)|).

Weights are summed as two halves of 21 bits, since 32-bit lanes exist in every instruction set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vector import (
    F32,
    I16,
    I32,
    LANES,
    VEC_F32,
    VEC_I32,
    call_lanes,
    fold_lanes,
    load_vector,
    pointer,
    splat,
    store_vector,
)

__all__ = [
    "GROUP",
    "HALF_BITS",
    "collect_group",
    "count_group",
    "excess_group",
    "from_key",
    "odds_group",
    "peak_group",
    "portion_group",
    "probs_group",
    "sum_group",
    "to_key",
    "top_group",
]

GROUP = 64
HALF_BITS = 21
HALF = float(1 << HALF_BITS)
SMALLEST = -64.0  # the exponent of 2 at which odds stop falling; far below the last weight of 1
# 2^f = 1 + f * (c[0] + f * (...)) on [-1/2, 1/2]; relative error 2e-9 before rounding
POWERS = (0.6931471824645996, 0.24022647738456726, 0.055503323674201965,
          0.00961843691766262, 0.0013398875016719103, 0.00015353360504377633)  # fmt: skip

I64, F64 = ir.IntType(64), ir.DoubleType()
VEC_F64 = ir.VectorType(F64, LANES)
MASK = ir.VectorType(ir.IntType(1), LANES)


@intrinsic
def to_key(_context, value):
    """Give a float32 as a whole number that compares as the float does."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], I32)
        return builder.xor(bits, builder.lshr(builder.ashr(bits, I32(31)), I32(1)))

    return types.int32(types.float32), generate


@intrinsic
def from_key(_context, key):
    """Undo `to_key`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.xor(args[0], builder.lshr(builder.ashr(args[0], I32(31)), I32(1)))
        return builder.bitcast(bits, F32)

    return types.float32(types.int32), generate


@intrinsic
def top_group(_context, row, at):
    """Find the largest of 64 numbers; NaN if one of them is NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b, c, d = _load_group(context, builder, signature, args)
        unordered = builder.fcmp_unordered
        wrong = builder.or_(unordered("uno", a, b), unordered("uno", c, d))

        def larger(x: Any, y: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        best = fold_lanes(builder, larger(larger(a, b), larger(c, d)), larger)
        any_wrong = builder.icmp_unsigned("!=", builder.bitcast(wrong, I16), I16(0))
        return builder.select(any_wrong, F32(float("nan")), best)

    return types.float32(row, types.intp), generate


@intrinsic
def odds_group(_context, row, at, top, rate, cut, floor, odds, place):
    """Write the odds of 64 columns and return the sum of their weights.

    Columns whose logit is below `cut` or whose odds are below `floor` get 0.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = _load_group(context, builder, signature, args)
        out = pointer(context, builder, signature.args[6], args[6], args[7], F32)
        top_v, rate_v, cut_v, floor_v = (splat(builder, each) for each in args[2:6])
        zero = _constant(0.0)
        kept = []
        for index, x in enumerate(vectors):
            power = builder.fmul(builder.fsub(x, top_v), rate_v)
            odds = _power_of_two(builder, power)
            stays = builder.and_(
                builder.fcmp_ordered(">=", x, cut_v), builder.fcmp_ordered(">=", odds, floor_v)
            )
            odds = builder.select(stays, odds, zero)
            store_vector(builder, odds, out, args[7].type(index * LANES))
            kept.append(odds)
        return _sum_weights(builder, kept)

    f32, at = types.float32, types.intp
    return types.int64(row, at, f32, f32, f32, f32, odds, at), generate


@intrinsic
def sum_group(_context, odds, at, floor):
    """Return the sum of the weights of those of 64 odds that are not below `floor`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        floor_v, zero = splat(builder, args[2]), _constant(0.0)
        kept = [
            builder.select(builder.fcmp_ordered(">=", each, floor_v), each, zero)
            for each in _load_group(context, builder, signature, args)
        ]
        return _sum_weights(builder, kept)

    return types.int64(odds, types.intp, types.float32), generate


@intrinsic
def collect_group(_context, row, at, low, high, out, count):
    """Append those of 64 numbers that lie in [low, high], in order, and return the new count.

    `out` may be `row` itself where count <= at.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lowest, highest = splat(builder, args[2]), splat(builder, args[3])
        target = pointer(context, builder, signature.args[4], args[4], I64(0), F32)
        kind = ir.FunctionType(ir.VoidType(), [VEC_F32, ir.PointerType(F32), MASK])
        compress = cgutils.get_or_insert_function(
            builder.module, kind, f"llvm.masked.compressstore.v{LANES}f32"
        )
        count = args[5]
        for x in _load_group(context, builder, signature, args):
            stays = builder.and_(
                builder.fcmp_ordered(">=", x, lowest), builder.fcmp_ordered("<=", x, highest)
            )
            builder.call(compress, [x, builder.gep(target, [count]), stays])
            count = builder.add(count, _count_lanes(builder, stays))
        return count

    f32, at = types.float32, types.intp
    return types.intp(row, at, f32, f32, out, at), generate


@intrinsic
def count_group(_context, row, at, lowest):
    """Count those of 64 numbers that are not below `lowest`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lowest, total = splat(builder, args[2]), I64(0)
        for x in _load_group(context, builder, signature, args):
            stays = builder.fcmp_ordered(">=", x, lowest)
            total = builder.add(total, _count_lanes(builder, stays))
        return total

    return types.int64(row, types.intp, types.float32), generate


@intrinsic
def probs_group(_context, odds, at, floor, scale, probs, place):
    """Write 64 probabilities: the weights of the odds not below `floor`, times `scale`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out = pointer(context, builder, signature.args[4], args[4], args[5], F32)
        floor_v, zero, unit = splat(builder, args[2]), _constant(0.0), _constant(HALF * HALF)
        scale_v = splat(builder, args[3])
        for index, each in enumerate(_load_group(context, builder, signature, args)):
            kept = builder.select(builder.fcmp_ordered(">=", each, floor_v), each, zero)
            weight = call_lanes(builder, "trunc", builder.fmul(kept, unit))
            exact = builder.fmul(builder.fpext(weight, VEC_F64), scale_v)
            rounded = builder.fptrunc(exact, VEC_F32)
            store_vector(builder, rounded, out, args[5].type(index * LANES))
        return context.get_dummy_value()

    at = types.intp
    return types.void(odds, at, types.float32, types.float64, probs, at), generate


@intrinsic
def excess_group(_context, probs, at, drafts, place, share, excess, target):
    """Write max(0, share * p - q) of 64 columns as float64; return the sum of floor(it * 2^42).

    The sum is a float64 too: whole numbers below 2^53, exact in any order.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        p = pointer(context, builder, signature.args[0], args[0], args[1], F32)
        q = pointer(context, builder, signature.args[2], args[2], args[3], F32)
        out = pointer(context, builder, signature.args[5], args[5], args[6], F64)
        share_v = splat(builder, args[4])
        zero = ir.Constant(VEC_F64, [0.0] * LANES)
        unit = ir.Constant(VEC_F64, [HALF * HALF] * LANES)
        total = zero
        for lane in range(0, GROUP, LANES):
            index = args[1].type(lane)
            p_x = builder.fpext(load_vector(builder, p, index), VEC_F64)
            q_x = builder.fpext(load_vector(builder, q, index), VEC_F64)
            more = builder.fsub(builder.fmul(p_x, share_v), q_x)
            more = builder.select(builder.fcmp_ordered(">", more, zero), more, zero)
            here = builder.bitcast(builder.gep(out, [index]), ir.PointerType(VEC_F64))
            builder.store(more, here, align=8)
            total = builder.fadd(total, _trunc_f64(builder, builder.fmul(more, unit)))
        return fold_lanes(builder, total, builder.fadd)

    f64, at = types.float64, types.intp
    return f64(probs, at, drafts, at, f64, excess, at), generate


@intrinsic
def peak_group(_context, values, at):
    """Find the largest of 64 float64 that are not below 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def larger(x: Any, y: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        best = functools.reduce(larger, _load_f64(context, builder, signature, args))
        return fold_lanes(builder, best, larger)

    return types.float64(values, types.intp), generate


@intrinsic
def portion_group(_context, values, at, top):
    """Return the sum of floor(value / top * 2^42) over 64 float64, none above `top`; exact."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        top_v = splat(builder, args[2])
        unit = ir.Constant(VEC_F64, [HALF * HALF] * LANES)
        total = ir.Constant(VEC_F64, [0.0] * LANES)
        for value in _load_f64(context, builder, signature, args):
            portion = builder.fmul(builder.fdiv(value, top_v), unit)
            total = builder.fadd(total, _trunc_f64(builder, portion))
        return builder.fptosi(fold_lanes(builder, total, builder.fadd), I64)

    return types.int64(values, types.intp, types.float64), generate


def _load_f64(context: Any, builder: Any, signature: Any, args: Any) -> list[Any]:
    """Load 64 float64 from the array and place that are a piece's first two arguments."""
    start = pointer(context, builder, signature.args[0], args[0], args[1], F64)
    vectors = []
    for lane in range(0, GROUP, LANES):
        here = builder.gep(start, [args[1].type(lane)])
        vectors.append(builder.load(builder.bitcast(here, ir.PointerType(VEC_F64)), align=8))
    return vectors


def _trunc_f64(builder: Any, value: Any) -> Any:
    kind = ir.FunctionType(VEC_F64, [VEC_F64])
    name = f"llvm.trunc.v{LANES}f64"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [value])


def _constant(value: float) -> Any:
    return ir.Constant(VEC_F32, [value] * LANES)


def _load_group(context: Any, builder: Any, signature: Any, args: Any) -> list[Any]:
    """Load 64 numbers from the array and place that are a piece's first two arguments."""
    start = pointer(context, builder, signature.args[0], args[0], args[1], F32)
    return [load_vector(builder, start, args[1].type(i)) for i in range(0, GROUP, LANES)]


def _count_lanes(builder: Any, mask: Any) -> Any:
    """Count the lanes that are true, as 64 bits."""
    kind = ir.FunctionType(I16, [I16])
    ones = cgutils.get_or_insert_function(builder.module, kind, "llvm.ctpop.i16")
    return builder.zext(builder.call(ones, [builder.bitcast(mask, I16)]), I64)


def _power_of_two(builder: Any, exponent: Any) -> Any:
    """2^exponent for exponents up to 0; NaN gives the smallest."""
    smallest = _constant(SMALLEST)
    above = builder.fcmp_ordered(">", exponent, smallest)
    exponent = builder.select(above, exponent, smallest)
    whole = call_lanes(builder, "rint", exponent)
    fraction = builder.fsub(exponent, whole)  # exact
    power = _polynomial(builder, fraction)
    shift = builder.shl(builder.fptosi(whole, VEC_I32), VEC_I32([23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(power, VEC_I32), shift), VEC_F32)


def _polynomial(builder: Any, f: Any) -> Any:
    """2^f, in pairs of terms rather than one after the other: half the waiting."""
    add, mul, c = builder.fadd, builder.fmul, [_constant(each) for each in POWERS]
    square = mul(f, f)
    low = add(mul(f, c[0]), _constant(1.0))
    middle = add(mul(f, c[2]), c[1])
    high = add(add(mul(f, c[4]), c[3]), mul(square, c[5]))
    return add(add(low, mul(square, middle)), mul(mul(square, square), high))


def _sum_weights(builder: Any, odds: list[Any]) -> Any:
    """Sum floor(each * 2^42) over the lanes of four vectors: 64 halves of 21 bits fit 32 bits."""
    half = _constant(HALF)
    uppers, lowers = VEC_I32([0] * LANES), VEC_I32([0] * LANES)
    for each in odds:
        scaled = builder.fmul(each, half)
        upper = builder.fptosi(scaled, VEC_I32)
        rest = builder.fsub(scaled, builder.sitofp(upper, VEC_F32))  # exact
        lower = builder.fptosi(builder.fmul(rest, half), VEC_I32)
        uppers, lowers = builder.add(uppers, upper), builder.add(lowers, lower)
    total = _fold_pair(builder, uppers, lowers, builder.add)
    first = builder.zext(builder.extract_element(total, I32(0)), I64)
    second = builder.zext(builder.extract_element(total, I32(LANES // 2)), I64)
    return builder.add(builder.shl(first, I64(HALF_BITS)), second)


def _fold_pair(builder: Any, a: Any, b: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Fold two vectors at once: a's result ends in lane 0, b's in the middle lane."""
    half = LANES // 2

    def shuffle(x: Any, y: Any, order: list[int]) -> Any:
        return builder.shuffle_vector(x, y, ir.Constant(VEC_I32, order))

    near = [*range(half), *range(LANES, LANES + half)]
    vector = combine(shuffle(a, b, near), shuffle(a, b, [lane + half for lane in near]))
    width = half // 2
    while width:
        order = [(lane + width) % LANES for lane in range(LANES)]
        vector = combine(vector, shuffle(vector, vector, order))
        width //= 2
    return vector
