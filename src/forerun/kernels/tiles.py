"""The two tiles that do the arithmetic of attention, for four query rows at once.

Every partial sum stays in a register. The order of the sums depends on the head size and the
key block alone, never on how many rows run together: that is why a row's bits are the same in
any batch. A fused multiply-add per element beats the processor's bfloat16 dot product here: the
latter has half the throughput on the machines measured.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vector import (
    F32,
    I32,
    LANES,
    VEC_F32,
    WIDE,
    fma,
    high_half,
    load_vector,
    low_half,
    pointer,
    splat,
    store_vector,
    sum_loop,
)

I8 = ir.IntType(8)

__all__ = ["KEY_BLOCK", "TILE_ROWS", "score_tile", "value_tile"]

KEY_BLOCK = 32  # positions of a cache block: two vectors
LINE = 64  # bytes that memory gives at once
TILE_ROWS = 4  # query rows that share each loaded key: eight sums in registers


def _tile_signature(target: Any, weights: Any, stored: Any) -> Any:
    at = types.intp
    return types.void(target, at, at, weights, at, at, stored, at, at, at)


@intrinsic
def score_tile(
    _context, scores, s_at, s_stride, queries, q_at, q_stride, keys, k_at, k_stride, size,
    next_at, values, value_at,
):  # fmt: skip
    """scores[r, j] = sum_d queries[r, d] * keys[d, j] for 4 rows and 32 positions.

    On the way the blocks at `next_at` of `keys` and `value_at` of `values` are fetched: blocks lie
    scattered, and where one ends the processor cannot guess where the next begins.

    `scores`, `queries` are float32, `keys` is a block as the cache stores it. Offsets and
    strides count elements of the array concerned; `k_stride` is that of one stored row.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *product, next_at, coming, coming_at = args
        kinds = signature.args
        ahead = [
            pointer(context, builder, kinds[6], args[6], next_at, I8),
            pointer(context, builder, kinds[11], coming, coming_at, I8),
        ]
        return _tile(context, builder, signature, product, ahead, accumulate=False)

    at = types.intp
    product = _tile_signature(scores, queries, keys)
    return types.void(*product.args, at, values, at), generate


@intrinsic
def value_tile(
    _context, sums, a_at, a_stride, weights, w_at, w_stride, values, v_at, v_stride, count
):
    """sums[r, d] += sum_j weights[r, j] * values[j, d] for 4 rows and 32 elements of a head."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _tile(context, builder, signature, args, [], accumulate=True)

    return _tile_signature(sums, weights, values), generate


def _tile(
    context: Any, builder: Any, signature: Any, args: Any, ahead: list[Any], *, accumulate: bool
) -> Any:
    """target[4, 32] (+)= weights[4, depth] x stored[depth, 32].

    `ahead` points to blocks of the size of `stored` that are fetched a line at a time.
    """
    target, t_at, t_stride, weights, w_at, w_stride, stored, s_at, s_stride, depth = args
    paired = signature.args[6].dtype == types.uint16
    index_type, pack = depth.type, 2 if paired else 1
    goal = pointer(context, builder, signature.args[0], target, t_at, F32)
    rows = pointer(context, builder, signature.args[3], weights, w_at, F32)
    unit = I32 if paired else F32
    columns = pointer(context, builder, signature.args[6], stored, s_at, unit)
    if paired:
        s_stride = builder.lshr(s_stride, index_type(1))
        depth = builder.lshr(depth, index_type(1))
    # Sums that do not fit the registers would go to memory and back at every step.
    for halves in [(0, 1)] if WIDE else [(0,), (1,)]:
        places = [
            builder.add(builder.mul(t_stride, index_type(r)), index_type(LANES * half))
            for r in range(TILE_ROWS)
            for half in halves
        ]
        zero = ir.Constant(VEC_F32, [0.0] * LANES)
        start = [load_vector(builder, goal, at) if accumulate else zero for at in places]

        def body(index: Any, totals: list[Any], halves: tuple[int, ...] = halves) -> list[Any]:
            # A row of 32 positions is two lines of 32-bit numbers, or of pairs.
            for block in ahead:
                for half in halves:
                    line = builder.add(builder.mul(index, index_type(2)), index_type(half))
                    _fetch(builder, builder.gep(block, [builder.mul(line, index_type(LINE))]))
            stored_row = builder.mul(index, s_stride)
            loaded = []  # [halves][pack]
            for half in halves:
                at = builder.add(stored_row, index_type(LANES * half))
                vector = load_vector(builder, columns, at)
                loaded.append(
                    [low_half(builder, vector), high_half(builder, vector)] if paired else [vector]
                )
            for r in range(TILE_ROWS):
                first = builder.add(
                    builder.mul(w_stride, index_type(r)), builder.mul(index, index_type(pack))
                )
                for element in range(pack):
                    at = builder.add(first, index_type(element))
                    weight = splat(builder, builder.load(builder.gep(rows, [at])))
                    for h, parts in enumerate(loaded):
                        place = len(halves) * r + h
                        totals[place] = fma(builder, weight, parts[element], totals[place])
            return totals

        totals = sum_loop(builder, depth, start, body)
        for at, total in zip(places, totals, strict=True):
            store_vector(builder, total, goal, at)
    return context.get_dummy_value()


def _fetch(builder: Any, place: Any) -> None:
    """Ask for a line of memory before it is needed."""
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [place, I32(0), I32(3), I32(1)])  # to read; keep it near; data
