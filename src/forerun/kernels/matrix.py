"""Products with a weight that lies in panels of 16 outputs: y = x W^T + b, each sum in one order.

A panel holds 16 outputs' weights side by side for one input after the other, so that a vector
runs over outputs and memory is read from front to back:

    bfloat16 weights   uint32 [panels, inputs / 2, 16], two neighbouring inputs in one number
    float32 weights    float32 [panels, inputs, 16]
    8-bit weights      int8 [panels, inputs / 2, 32], 16 outputs' pairs of inputs (`integers`)

A row's bits depend on nothing beside it, however rows are cut into tiles (`floats`). Weights go
through memory once for all rows of a call up to `ROW_BLOCK`.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.extending import intrinsic

from .floats import float_tile
from .integers import integer_tile
from .vector import LANES, WIDE

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
    def tile(
        _context, x, x_at, depth, packed, at, size, bias, bias_at, out, out_at, stride, scales,
        scale_at, row_scales, row,
    ):  # fmt: skip
        make = integer_tile if packed.dtype == types.int8 else float_tile

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            make(context, builder, signature, args, num_rows, num_panels, accumulate)
            return context.get_dummy_value()

        n = types.intp
        return (
            types.void(x, n, n, packed, n, n, bias, n, out, n, n, scales, n, row_scales, n),
            generate,
        )

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
    def run(
        x, row_scales, first, end, packed, scales, layer, panel, end_panel, bias, out, out_at,
        stride,
    ):  # fmt: skip
        """Rows first..end of x [N, inputs] times panels panel..end_panel of a layer's matrix.

        packed [layers, panels, .., ..]; bias, scales [layers, panels * 16]; row_scales [N]: scales
        matter for weights of eight bits, whose x is whole numbers (`integers`).
        Row `first` and the first output go to element `out_at` of `out`, whose rows are `stride`
        elements apart.
        """
        depth, size = x.shape[1], packed.shape[2] * packed.shape[3]
        base, bias_base = layer * packed.shape[1] * size, layer * bias.shape[1]
        scale_base = layer * scales.shape[1]
        fours = first + (end - first) // 4 * 4
        p = panel
        while p < end_panel:  # a panel stays in the nearest cache while all rows go by
            at, bias_at = base + p * size, bias_base + p * PANEL
            scale_at = scale_base + p * PANEL
            place, wide = out_at + (p - panel) * PANEL, p + wide4 <= end_panel
            for r in range(first, fours, 4):
                target = place + (r - first) * stride
                if wide:
                    tile4(
                        x, r * depth, depth, packed, at, size, bias, bias_at, out, target, stride,
                        scales, scale_at, row_scales, r,
                    )  # fmt: skip
                else:
                    single4(
                        x, r * depth, depth, packed, at, size, bias, bias_at, out, target, stride,
                        scales, scale_at, row_scales, r,
                    )  # fmt: skip
            p += wide4 if wide else 1
        rest, row, p = end - fours, fours * depth, panel
        if rest == 0:
            return
        width = wide1 if rest == 1 else wide2 if rest == 2 else wide3
        while p < end_panel:
            at, bias_at = base + p * size, bias_base + p * PANEL
            scale_at = scale_base + p * PANEL
            target = out_at + (fours - first) * stride + (p - panel) * PANEL
            wide = p + width <= end_panel
            if rest == 3 and wide:
                tile3(
                    x, row, depth, packed, at, size, bias, bias_at, out, target, stride, scales,
                    scale_at, row_scales, fours,
                )  # fmt: skip
            elif rest == 3:
                single3(
                    x, row, depth, packed, at, size, bias, bias_at, out, target, stride, scales,
                    scale_at, row_scales, fours,
                )  # fmt: skip
            elif rest == 2 and wide:
                tile2(
                    x, row, depth, packed, at, size, bias, bias_at, out, target, stride, scales,
                    scale_at, row_scales, fours,
                )  # fmt: skip
            elif rest == 2:
                single2(
                    x, row, depth, packed, at, size, bias, bias_at, out, target, stride, scales,
                    scale_at, row_scales, fours,
                )  # fmt: skip
            elif wide:
                tile1(
                    x, row, depth, packed, at, size, bias, bias_at, out, target, stride, scales,
                    scale_at, row_scales, fours,
                )  # fmt: skip
            else:
                single1(
                    x, row, depth, packed, at, size, bias, bias_at, out, target, stride, scales,
                    scale_at, row_scales, fours,
                )  # fmt: skip
            p += width if wide else 1

    return run


# Storing the sums, rounded to the format of `out`; adding them to what stands there.
product = _make_product(accumulate=False)
add_product = _make_product(accumulate=True)
