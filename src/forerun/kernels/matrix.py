"""Products with a weight that lies in panels of 16 outputs: y = x W^T + b, each sum in one order.

A panel holds 16 outputs' weights side by side for one input after the other, so that a vector
runs over outputs and memory is read from front to back:

    bfloat16 weights   uint32 [panels, inputs / 2, 16], two neighbouring inputs in one number
    float32 weights    float32 [panels, inputs, 16]

Every sum begins with its bias and takes the inputs in ascending order, one fused multiply-add
each, whatever the number of rows and however they are cut into tiles: a row's bits depend on
nothing beside it. Weights go through memory once for all rows of a call up to `ROW_BLOCK`.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.extending import intrinsic

from .vector import (
    F32,
    I16,
    I32,
    LANES,
    WIDE,
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

__all__ = ["PANEL", "ROW_BLOCK", "STRIP", "add_product", "product"]

PANEL = LANES  # outputs side by side
ROW_BLOCK = 64  # rows that share one reading of the weights: their inputs stay in the cache


# Panels that a tile of 1, 2, 3 or 4 rows takes at once: as many sums as registers hold, and at
# least eight, since a multiply-add takes four cycles and two can begin in each.
_PANELS = (4, 4, 4, 4) if WIDE else (2, 2, 1, 1)
STRIP = 4 if WIDE else 2  # panels of one part of a phase; a multiple of each of the above


def _make_tile(num_rows: int, num_panels: int, accumulate: bool) -> Any:
    """Make the kernel for so many rows and panels; `accumulate` adds to `out`."""

    @intrinsic
    def tile(_context, x, x_at, depth, packed, at, size, bias, bias_at, out, out_at, stride):
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, x_at, depth, packed, at, size, bias, bias_at, out, out_at, stride = args
            kinds, number = signature.args, depth.type
            paired = kinds[3].dtype == types.uint32
            pack, unit = (2, I32) if paired else (1, F32)
            rows = [
                pointer(
                    context, builder, kinds[0], x,
                    builder.add(x_at, builder.mul(depth, number(r))), F32,
                )
                for r in range(num_rows)
            ]  # fmt: skip
            panels = [
                pointer(
                    context, builder, kinds[3], packed,
                    builder.add(at, builder.mul(size, number(p))), unit,
                )
                for p in range(num_panels)
            ]  # fmt: skip
            offsets = pointer(context, builder, kinds[6], bias, bias_at, F32)
            begin = [load_vector(builder, offsets, number(p * PANEL)) for p in range(num_panels)]

            def body(index: Any, totals: list[Any]) -> list[Any]:
                place = builder.mul(index, number(PANEL))
                weights = []  # [panels][pack]
                for panel in panels:
                    loaded = load_vector(builder, panel, place)
                    weights.append(
                        [low_half(builder, loaded), high_half(builder, loaded)]
                        if paired
                        else [loaded]
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
            stored = F32 if kinds[8].dtype == types.float32 else I16
            for r in range(num_rows):
                start = builder.add(out_at, builder.mul(stride, number(r)))
                target = pointer(context, builder, kinds[8], out, start, stored)
                for p in range(num_panels):
                    total = totals[r * num_panels + p]
                    if accumulate:
                        if stored != F32:
                            total = round_bf16(builder, total)
                        present = load_stored(builder, target, number(p * PANEL))
                        total = builder.fadd(present, total)
                    store_rounded(builder, total, target, number(p * PANEL))
            return context.get_dummy_value()

        n = types.intp
        return types.void(x, n, n, packed, n, n, bias, n, out, n, n), generate

    return tile


def _make_product(accumulate: bool) -> Any:
    tiles = [_make_tile(r + 1, _PANELS[r], accumulate) for r in range(4)]
    singles = [
        tile if width == 1 else _make_tile(r + 1, 1, accumulate)
        for r, (tile, width) in enumerate(zip(tiles, _PANELS, strict=True))
    ]
    (tile1, tile2, tile3, tile4), (single1, single2, single3, single4) = tiles, singles
    wide1, wide2, wide3, wide4 = _PANELS

    @njit(nogil=True)
    def run(x, first, end, packed, layer, panel, end_panel, bias, out, out_at, stride):
        """Rows first..end of x [N, inputs] times panels panel..end_panel of a layer's matrix.

        packed [layers, panels, .., 16]; bias [layers, panels * 16]. Row `first` and the first
        output go to element `out_at` of `out`, whose rows are `stride` elements apart.
        """
        depth, size = x.shape[1], packed.shape[2] * PANEL
        base, bias_base = layer * packed.shape[1] * size, layer * bias.shape[1]
        fours = first + (end - first) // 4 * 4
        p = panel
        while p < end_panel:  # a panel stays in the nearest cache while all rows go by
            at, bias_at = base + p * size, bias_base + p * PANEL
            place, wide = out_at + (p - panel) * PANEL, p + wide4 <= end_panel
            for r in range(first, fours, 4):
                target = place + (r - first) * stride
                if wide:
                    tile4(x, r * depth, depth, packed, at, size, bias, bias_at, out, target, stride)
                else:
                    single4(
                        x, r * depth, depth, packed, at, size, bias, bias_at, out, target, stride
                    )
            p += wide4 if wide else 1
        rest, row, p = end - fours, fours * depth, panel
        if rest == 0:
            return
        width = wide1 if rest == 1 else wide2 if rest == 2 else wide3
        while p < end_panel:
            at, bias_at = base + p * size, bias_base + p * PANEL
            target = out_at + (fours - first) * stride + (p - panel) * PANEL
            wide = p + width <= end_panel
            if rest == 3 and wide:
                tile3(x, row, depth, packed, at, size, bias, bias_at, out, target, stride)
            elif rest == 3:
                single3(x, row, depth, packed, at, size, bias, bias_at, out, target, stride)
            elif rest == 2 and wide:
                tile2(x, row, depth, packed, at, size, bias, bias_at, out, target, stride)
            elif rest == 2:
                single2(x, row, depth, packed, at, size, bias, bias_at, out, target, stride)
            elif wide:
                tile1(x, row, depth, packed, at, size, bias, bias_at, out, target, stride)
            else:
                single1(x, row, depth, packed, at, size, bias, bias_at, out, target, stride)
            p += width if wide else 1

    return run


# Storing the sums, rounded to the format of `out`; adding them to what stands there.
product = _make_product(accumulate=False)
add_product = _make_product(accumulate=True)
