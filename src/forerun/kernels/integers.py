"""Products with weights of eight bits: whole numbers times whole numbers, so every order is exact.

A weight is a number of eight bits times its output's scale. A row of inputs is rounded too, when it
is used: to whole numbers of up to sixteen bits, as many as keep the sum of a whole row inside 32
bits, times a scale of its own. That loses next to nothing (a part in ten thousand of the row's
largest number), unlike rows of eight bits, and costs nothing where processors multiply pairs of
sixteen bits.

    weights   int8 [panels, inputs / 2, 32]: 16 outputs' pairs of neighbouring inputs
    rows      int16 [N, inputs], scales float32 [N]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils

from .floats import rows_and_panels, store_sums
from .vector import (
    F32,
    I16,
    I32,
    LANES,
    VEC_F32,
    VEC_I32,
    bits_of,
    fma,
    has_feature,
    load_vector,
    pointer,
    splat,
    sum_loop,
)

__all__ = ["WEIGHT_LIMIT", "integer_tile", "round_row"]

I8 = ir.IntType(8)
WEIGHT_LIMIT = 127
# Adding 1.5 * 2^23 leaves the nearest whole number in a float32's lowest bits.
_MAGIC = np.float32(12582912.0)
_MAGIC_BITS = np.int32(0x4B400000)


@njit(nogil=True)
def round_row(x, row, rounded, scales):
    """Round x[row] to whole numbers in rounded[row], which times scales[row] are about the row.

    NaN or infinity anywhere makes the scale NaN, and with it all that is computed from the row.
    """
    width = x.shape[1]
    largest = np.uint32(0)
    for i in range(width):
        size = bits_of(x[row, i]) & np.uint32(0x7FFFFFFF)
        if size > largest:
            largest = size
    if largest >= np.uint32(0x7F800000):
        for i in range(width):
            rounded[row, i] = 0
        scales[row] = np.float32(np.nan)
        return
    top = np.float32(0)
    for i in range(width):
        top = max(top, abs(x[row, i]))
    limit = np.float32(min(32767, 2147483647 // (WEIGHT_LIMIT * width)))
    scales[row] = top / limit
    factor = limit / top if top > np.float32(1e-30) else np.float32(0)
    for i in range(width):
        rounded[row, i] = np.int16(
            np.int32(bits_of(np.float32(x[row, i] * factor) + _MAGIC)) - _MAGIC_BITS
        )


def _multiply_pairs(builder: Any, weights: Any, pair: Any) -> Any:
    """16 sums of two products: weights <32 x i16>, pair <32 x i16> of one pair repeated."""
    halves = [[*range(16)], [*range(16, 32)]]
    wide = ir.VectorType(I16, 32)
    if has_feature("avx512bw"):
        kind = ir.FunctionType(VEC_I32, [wide, wide])
        name = "llvm.x86.avx512.pmaddw.d.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [weights, pair])
    if has_feature("avx2"):
        narrow, result = ir.VectorType(I16, 16), ir.VectorType(I32, 8)
        kind = ir.FunctionType(result, [narrow, narrow])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd")
        parts = [
            builder.call(function, [_pick(builder, weights, half), _pick(builder, pair, half)])
            for half in halves
        ]
        order = ir.Constant(ir.VectorType(I32, 16), [*range(16)])
        return builder.shuffle_vector(parts[0], parts[1], order)
    products = [
        builder.mul(
            builder.sext(_pick(builder, weights, places), VEC_I32),
            builder.sext(_pick(builder, pair, places), VEC_I32),
        )
        for places in ([*range(0, 32, 2)], [*range(1, 32, 2)])
    ]
    return builder.add(*products)


def _pick(builder: Any, vector: Any, places: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(I32, len(places)), places)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def integer_tile(
    context: Any, builder: Any, signature: Any, args: Any, num_rows: int, num_panels: int,
    accumulate: bool,
) -> None:  # fmt: skip
    """Generate the tile for weights of eight bits; see `matrix`."""
    depth, bias, bias_at = args[2], args[6], args[7]
    scales, scale_at, row_scales, first_row = args[11:]
    kinds, number = signature.args, depth.type
    # Rows are read in pairs, panels as bytes.
    rows, panels = rows_and_panels(context, builder, signature, args, num_rows, num_panels, I32, I8)
    bytes32 = ir.PointerType(ir.VectorType(I8, 32))

    def body(index: Any, totals: list[Any]) -> list[Any]:
        place = builder.mul(index, number(2 * LANES))
        weights = []
        for panel in panels:
            where = builder.bitcast(builder.gep(panel, [place]), bytes32)
            loaded = builder.load(where, align=1)
            weights.append(builder.sext(loaded, ir.VectorType(I16, 32)))
        for r, row in enumerate(rows):
            value = builder.load(builder.gep(row, [index]), align=2)
            pair = builder.bitcast(splat(builder, value), ir.VectorType(I16, 32))
            for p in range(num_panels):
                where = r * num_panels + p
                products = _multiply_pairs(builder, weights[p], pair)
                totals[where] = builder.add(totals[where], products)
        return totals

    zero = ir.Constant(VEC_I32, [0] * LANES)
    count = builder.udiv(depth, number(2))
    totals = sum_loop(builder, count, [zero] * (num_rows * num_panels), body)
    offsets = pointer(context, builder, kinds[6], bias, bias_at, F32)
    factors = pointer(context, builder, kinds[11], scales, scale_at, F32)
    own = pointer(context, builder, kinds[13], row_scales, first_row, F32)
    by_row = []
    for r in range(num_rows):
        scale = splat(builder, builder.load(builder.gep(own, [number(r)])))
        finished = []
        for p in range(num_panels):
            lane = number(p * LANES)
            sums = builder.sitofp(totals[r * num_panels + p], VEC_F32)
            factor = builder.fmul(load_vector(builder, factors, lane), scale)
            finished.append(fma(builder, sums, factor, load_vector(builder, offsets, lane)))
        by_row.append(finished)
    store_sums(context, builder, signature, args, by_row, accumulate)
