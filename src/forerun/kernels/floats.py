"""The tile of a matrix product over floating-point weights: a few rows times a few panels.

Every sum begins with its bias and takes the inputs in ascending order, one fused multiply-add each,
whatever the numbers of rows and panels: a row's bits depend on nothing beside it.
"""

from __future__ import annotations

from typing import Any

from numba import types

from .vector import (
    F32,
    I16,
    I32,
    LANES,
    fma,
    high_half,
    load_stored,
    load_vector,
    low_half,
    pointer,
    round_bf16,
    splat,
    store_rounded,
    sum_loop,
)

__all__ = ["float_tile", "rows_and_panels", "store_sums"]


def float_tile(
    context: Any, builder: Any, signature: Any, args: Any, num_rows: int, num_panels: int,
    accumulate: bool,
) -> None:  # fmt: skip
    """Generate the tile for weights as pairs of bfloat16 (uint32) or as float32; see `matrix`."""
    depth, bias, bias_at = args[2], args[6], args[7]
    kinds, number = signature.args, depth.type
    paired = kinds[3].dtype == types.uint32
    pack, unit = (2, I32) if paired else (1, F32)
    rows, panels = rows_and_panels(
        context, builder, signature, args, num_rows, num_panels, F32, unit
    )
    offsets = pointer(context, builder, kinds[6], bias, bias_at, F32)
    begin = [load_vector(builder, offsets, number(p * LANES)) for p in range(num_panels)]

    def body(index: Any, totals: list[Any]) -> list[Any]:
        place = builder.mul(index, number(LANES))
        weights = []  # [panels][pack]
        for panel in panels:
            loaded = load_vector(builder, panel, place)
            weights.append(
                [low_half(builder, loaded), high_half(builder, loaded)] if paired else [loaded]
            )
        first = builder.mul(index, number(pack))
        for element in range(pack):
            column = builder.add(first, number(element))
            for r, row in enumerate(rows):
                value = splat(builder, builder.load(builder.gep(row, [column])))
                for p in range(num_panels):
                    where = r * num_panels + p
                    totals[where] = fma(builder, value, weights[p][element], totals[where])
        return totals

    count = builder.udiv(depth, number(pack))
    totals = sum_loop(builder, count, begin * num_rows, body)
    by_row = [totals[r * num_panels : (r + 1) * num_panels] for r in range(num_rows)]
    store_sums(context, builder, signature, args, by_row, accumulate)


def rows_and_panels(
    context: Any, builder: Any, signature: Any, args: Any, num_rows: int, num_panels: int,
    element: Any, weight: Any,
) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """Point to a tile's rows, as runs of `element`s, and to its panels, as runs of `weight`s.

    Offsets and sizes among the arguments count elements of the arrays themselves.
    """
    x, x_at, depth, packed, at, size = args[:6]
    number, kinds = depth.type, signature.args

    def point(kind: Any, array: Any, first: Any, step: Any, index: int, unit: Any) -> Any:
        place = builder.add(first, builder.mul(step, number(index)))
        return pointer(context, builder, kind, array, place, unit)

    return (
        [point(kinds[0], x, x_at, depth, r, element) for r in range(num_rows)],
        [point(kinds[3], packed, at, size, p, weight) for p in range(num_panels)],
    )


def store_sums(
    context: Any, builder: Any, signature: Any, args: Any, totals: list[Any], accumulate: bool
) -> None:
    """Store a tile's sums [rows * panels], rounded to the format of `out`, or add them to it."""
    out, out_at, stride = args[8:11]
    number, kind = out_at.type, signature.args[8]
    stored = F32 if kind.dtype == types.float32 else I16
    num_rows, num_panels = len(totals), len(totals[0])
    for r in range(num_rows):
        start = builder.add(out_at, builder.mul(stride, number(r)))
        target = pointer(context, builder, kind, out, start, stored)
        for p in range(num_panels):
            total, lane = totals[r][p], number(p * LANES)
            if accumulate:
                if stored != F32:
                    total = round_bf16(builder, total)
                total = builder.fadd(load_stored(builder, target, lane), total)
            store_rounded(builder, total, target, lane)
