"""Phases that are matrix products, and what makes rows ready for them.

A part of such a phase is a strip of panels times a block of rows; see `team` for how parts are
shared, `matrix` for panels, `integers` for weights of eight bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from .integers import round_row
from .matrix import PANEL, ROW_BLOCK, STRIP, add_product, product
from .softmax import gate
from .team import finish, take

__all__ = [
    "add_matrix_phase",
    "choose",
    "chunk_of",
    "gate_phase",
    "matrix_phase",
    "prepare",
    "round_phase",
]


def prepare(x, row, whole, scales, packed):
    """Make row `row` of x ready for a product with `packed`: whole numbers for 8-bit weights."""
    raise NotImplementedError("for compiled code only")


@overload(prepare, inline="always")
def _prepare(x, row, whole, scales, packed):
    if packed.dtype == types.int8:
        return lambda x, row, whole, scales, packed: round_row(x, row, whole, scales)
    return lambda x, row, whole, scales, packed: None


def choose(x, whole, packed):
    """Choose what a product with `packed` reads: x, or the same as whole numbers."""
    raise NotImplementedError("for compiled code only")


@overload(choose, inline="always")
def _choose(x, whole, packed):
    if packed.dtype == types.int8:
        return lambda x, whole, packed: whole
    return lambda x, whole, packed: x


@njit(inline="always")
def _cut(part, num_strips, num_panels, num_rows):
    """What a part of a matrix phase holds: (first row, end row, first panel, end panel)."""
    block, strip = part // num_strips, part % num_strips
    first = block * ROW_BLOCK
    panel = strip * STRIP
    return first, min(first + ROW_BLOCK, num_rows), panel, min(panel + STRIP, num_panels)


@njit(inline="always")
def _count(num_panels, num_rows):
    """Count the strips of a matrix and the parts of its phase."""
    strips = (num_panels + STRIP - 1) // STRIP
    return strips, strips * ((num_rows + ROW_BLOCK - 1) // ROW_BLOCK)


def _make_phase(multiply: Any) -> Any:
    @njit(inline="always")
    def phase_of(
        counters, phase, x, row_scales, num_rows, packed, scales, layer, bias, out, stride
    ):
        num_panels, mine = packed.shape[1], 0
        strips, parts = _count(num_panels, num_rows)
        part = take(counters, phase)
        while part < parts:
            first, end, panel, end_panel = _cut(part, strips, num_panels, num_rows)
            at = first * stride + panel * PANEL
            multiply(
                x, row_scales, first, end, packed, scales, layer, panel, end_panel, bias, out, at,
                stride,
            )  # fmt: skip
            mine += 1
            part = take(counters, phase)
        finish(counters, phase, mine, parts)

    return phase_of


matrix_phase = _make_phase(product)  # out = x W^T + b
add_matrix_phase = _make_phase(add_product)  # out += x W^T + b


@njit(inline="always")
def gate_phase(counters, phase, h, row_scales, num_rows, packed, scales, layer, bias, like, active):
    """active = silu(gate) * up, strip by strip: gates and ups never leave the cache."""
    num_panels, mine = packed.shape[1] // 2, 0
    strips, parts = _count(num_panels, num_rows)
    width, span = active.shape[1], STRIP * PANEL
    sums = np.empty((ROW_BLOCK, 2 * span), like.dtype)
    part = take(counters, phase)
    while part < parts:
        first, end, panel, end_panel = _cut(part, strips, num_panels, num_rows)
        ups = panel + num_panels
        end_ups = end_panel + num_panels
        product(
            h, row_scales, first, end, packed, scales, layer, panel, end_panel, bias, sums, 0,
            2 * span,
        )  # fmt: skip
        product(
            h, row_scales, first, end, packed, scales, layer, ups, end_ups, bias, sums, span,
            2 * span,
        )  # fmt: skip
        count = (end_panel - panel) * PANEL
        for r in range(first, end):
            at = (r - first) * 2 * span
            gate(sums, at, at + span, active, r * width + panel * PANEL, count)
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@njit(inline="always")
def round_phase(counters, phase, num_rows, scratch, packed):
    """Make the rows of `active` ready, which no thread has seen whole."""
    chunk, mine = chunk_of(num_rows), 0
    parts = (num_rows + chunk - 1) // chunk
    if packed.itemsize > 1:
        parts = 0
    part = take(counters, phase)
    while part < parts:
        for t in range(part * chunk, min(num_rows, (part + 1) * chunk)):
            prepare(scratch.active, t, scratch.whole_active, scratch.row_scales, packed)
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@njit(inline="always")
def chunk_of(num_tokens):
    """How many tokens make a part where tokens are cheap: about 32 parts for a long step."""
    return 1 + num_tokens // 32
