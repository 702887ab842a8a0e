"""One whole pass of a decoder in one call: every layer's phases, shared by the threads there are.

Between its layers a pass would otherwise go back to Python some two hundred times and wake the
other threads as often, which costs more than all norms and activations together. Here a pass is one
parallel section; `team` says how its parts are shared.

    embed      tokens to rows of x, normed to h
    qkv        h to queries, keys, values
    rotate     positions into queries and keys; keys and values into the cache
    attend     partial softmax of (rows, KV head, segment of 256 positions)
    merge      segments of a token's heads to `mixed`
    out        mixed, projected, added to x
    norm       x to h
    gate_up    h to silu(gate) * up, `active`
    down       active, projected, added to x
    next       x to h for the next layer, or for the vocabulary those rows that are asked for
    head       to logits

Rounding follows the published models in a 16-bit format: what they store is rounded when they store
it. Logits alone stay float32, as the sums gave them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .attention import attend_unit, merge_token, rotate_token
from .compiling import FAST, compiled
from .matrix import PANEL, ROW_BLOCK, STRIP, add_product, product
from .softmax import gate
from .team import finish, take
from .vector import narrow, settle, widen

__all__ = [
    "Scratch",
    "Step",
    "Weights",
    "forward",
    "linear_layers",
    "num_phases",
]

PHASES_PER_LAYER = 9

Array = NDArray[Any]


class Weights(NamedTuple):
    """A model's weights; matrices in panels (`matrix`), other numbers in the storage format."""

    embedding: Array  # [1, panels, .., 16]: token t is output t
    qkv: Array  # [layers, panels, .., 16]
    qkv_bias: Array  # [layers, outputs] float32, like all biases; zeros where a model has none
    out: Array
    out_bias: Array
    gate_up: Array  # all gates' panels, then all ups'
    gate_up_bias: Array
    down: Array
    down_bias: Array
    head: Array  # [1, panels, .., 16]
    head_bias: Array
    input_norms: Array  # [layers + 1, E]; the last one is the final norm
    mlp_norms: Array  # [layers, E]
    q_norms: Array  # [layers, D], or [layers, 0] where a model has none
    k_norms: Array
    windows: Array  # [layers] int64: positions that a token sees
    cos: Array  # [positions, D / 2] float32
    sin: Array


class Step(NamedTuple):
    """The tokens of a pass, see `attention`."""

    tokens: Array  # [N] int64
    positions: Array  # [N] int64
    slots: Array  # [N] int64
    tables: Array  # [B, max_blocks] int64
    units: Array  # [U, 5] int64
    token_units: Array  # [N, 2] int64
    logit_rows: Array  # [M] int64


class Scratch(NamedTuple):
    """What a pass writes. x, qkv in the storage format, the rest float32."""

    x: Array  # [N, E] the residual stream
    h: Array  # [max(N, M), E]
    qkv: Array  # [N, (H + 2G) * D]
    queries: Array  # [G, N * H/G + 4, D]
    partial: Array  # [rows, D]
    tops: Array  # [rows]
    totals: Array  # [rows]
    mixed: Array  # [N, H * D]
    active: Array  # [N, F]
    logits: Array  # [M, panels of the vocabulary * 16]
    counters: Array  # [phases, 16] int64 zeros


def num_phases(num_layers: int) -> int:
    """Count the phases of a pass: one to begin with, those of the layers, one to end."""
    return 1 + PHASES_PER_LAYER * num_layers + 1


@njit(fastmath=FAST, nogil=True)
def _norm_row(x, t, weights, layer, eps, out, row):
    """out[row] = RMSNorm(x[t]) * weights[layer], rounded as x is stored."""
    width = x.shape[1]
    total = np.float32(0)
    for i in range(width):
        value = widen(x[t, i])
        total += value * value
    scale = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(width) + eps))
    for i in range(width):
        normed = settle(widen(x[t, i]) * scale, x)
        out[row, i] = settle(normed * widen(weights[layer, i]), x)


@njit(nogil=True)
def embed_token(token, table, x, t):
    """Read a token's row from panels, in which it is one lane of many vectors."""
    panel, lane = token // PANEL, token % PANEL
    width = x.shape[1]
    if table.shape[2] * 2 == width:  # two inputs in one number
        for i in range(table.shape[2]):
            pair = np.uint32(table[0, panel, i, lane])
            x[t, 2 * i] = narrow(widen(np.uint16(pair & np.uint32(0xFFFF))), x)
            x[t, 2 * i + 1] = narrow(widen(np.uint16(pair >> np.uint32(16))), x)
    else:
        for i in range(width):
            x[t, i] = narrow(np.float32(table[0, panel, i, lane]), x)


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


@njit(inline="always")
def _matrix_phase(counters, phase, x, num_rows, packed, layer, bias, out, stride):
    """out = x W^T + b."""
    num_panels, mine = packed.shape[1], 0
    strips, parts = _count(num_panels, num_rows)
    part = take(counters, phase)
    while part < parts:
        first, end, panel, end_panel = _cut(part, strips, num_panels, num_rows)
        at = first * stride + panel * PANEL
        product(x, first, end, packed, layer, panel, end_panel, bias, out, at, stride)
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@njit(inline="always")
def _add_matrix_phase(counters, phase, x, num_rows, packed, layer, bias, out, stride):
    """out += x W^T + b."""
    num_panels, mine = packed.shape[1], 0
    strips, parts = _count(num_panels, num_rows)
    part = take(counters, phase)
    while part < parts:
        first, end, panel, end_panel = _cut(part, strips, num_panels, num_rows)
        at = first * stride + panel * PANEL
        add_product(x, first, end, packed, layer, panel, end_panel, bias, out, at, stride)
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@njit(inline="always")
def _gate_phase(counters, phase, h, num_rows, packed, layer, bias, like, active):
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
        product(h, first, end, packed, layer, panel, end_panel, bias, sums, 0, 2 * span)
        product(h, first, end, packed, layer, ups, end_ups, bias, sums, span, 2 * span)
        count = (end_panel - panel) * PANEL
        for r in range(first, end):
            at = (r - first) * 2 * span
            gate(sums, at, at + span, active, r * width + panel * PANEL, count)
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@njit(inline="always")
def _chunk(num_tokens):
    """How many tokens make a part where tokens are cheap: about 32 parts for a long step."""
    return 1 + num_tokens // 32


@njit(inline="always")
def _embed_phase(counters, phase, weights, step, x, eps, h):
    num_tokens, mine = step.tokens.shape[0], 0
    chunk = _chunk(num_tokens)
    parts = (num_tokens + chunk - 1) // chunk
    part = take(counters, phase)
    while part < parts:
        for t in range(part * chunk, min(num_tokens, (part + 1) * chunk)):
            embed_token(step.tokens[t], weights.embedding, x, t)
            _norm_row(x, t, weights.input_norms, 0, eps, h, t)
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@njit(inline="always")
def _norm_phase(counters, phase, x, rows, norms, layer, eps, h):
    """Norm the rows named by `rows`, one after the other into h."""
    num_rows, mine = rows.shape[0], 0
    chunk = _chunk(num_rows)
    parts = (num_rows + chunk - 1) // chunk
    part = take(counters, phase)
    while part < parts:
        for m in range(part * chunk, min(num_rows, (part + 1) * chunk)):
            _norm_row(x, rows[m], norms, layer, eps, h, m)
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@njit(inline="always")
def _rotate_phase(counters, phase, weights, step, layer, eps, qkv, keys, values, queries):
    num_tokens, mine = step.tokens.shape[0], 0
    chunk = _chunk(num_tokens)
    parts = (num_tokens + chunk - 1) // chunk
    q_norm, k_norm = weights.q_norms[layer], weights.k_norms[layer]
    part = take(counters, phase)
    while part < parts:
        for t in range(part * chunk, min(num_tokens, (part + 1) * chunk)):
            rotate_token(
                t, qkv, weights.cos, weights.sin, q_norm, k_norm, eps, step.positions, step.slots,
                keys, values, queries,
            )  # fmt: skip
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@njit(inline="always")
def _attend_phase(counters, phase, step, window, keys, values, scratch):
    parts, mine = step.units.shape[0] * keys.shape[1], 0
    part = take(counters, phase)
    while part < parts:
        attend_unit(
            part, scratch.queries, keys, values, step.tables, step.positions, step.units, window,
            scratch.partial, scratch.tops, scratch.totals,
        )  # fmt: skip
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@njit(inline="always")
def _merge_phase(counters, phase, step, share, keys, scratch):
    num_tokens, mine = step.tokens.shape[0], 0
    chunk = _chunk(num_tokens)
    parts = (num_tokens + chunk - 1) // chunk
    part = take(counters, phase)
    while part < parts:
        for t in range(part * chunk, min(num_tokens, (part + 1) * chunk)):
            merge_token(
                t, step.units, step.token_units, keys.shape[1], share, scratch.partial,
                scratch.tops, scratch.totals, keys, scratch.mixed,
            )  # fmt: skip
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@compiled(fast=False)
def forward(weights, step, scratch, all_keys, all_values, eps, everything):
    """Take part in a pass until it is done.

    all_keys, all_values [layers, ...]: the cache's tensors; eps: float32 of the norms;
    `everything` names all rows, 0..N-1.
    """
    counters, x, h = scratch.counters, scratch.x, scratch.h
    num_tokens, num_layers = step.tokens.shape[0], weights.qkv.shape[0]
    share = (scratch.queries.shape[1] - 4) // num_tokens
    width = x.shape[1]
    _embed_phase(counters, 0, weights, step, x, eps, h)
    for layer in range(num_layers):
        phase = 1 + PHASES_PER_LAYER * layer
        keys, values = all_keys[layer], all_values[layer]
        _matrix_phase(
            counters, phase, h, num_tokens, weights.qkv, layer, weights.qkv_bias, scratch.qkv,
            scratch.qkv.shape[1],
        )  # fmt: skip
        _rotate_phase(
            counters, phase + 1, weights, step, layer, eps, scratch.qkv, keys, values,
            scratch.queries,
        )  # fmt: skip
        _attend_phase(counters, phase + 2, step, weights.windows[layer], keys, values, scratch)
        _merge_phase(counters, phase + 3, step, share, keys, scratch)
        _add_matrix_phase(
            counters, phase + 4, scratch.mixed, num_tokens, weights.out, layer, weights.out_bias,
            x, width,
        )  # fmt: skip
        _norm_phase(counters, phase + 5, x, everything, weights.mlp_norms, layer, eps, h)
        _gate_phase(
            counters, phase + 6, h, num_tokens, weights.gate_up, layer, weights.gate_up_bias, x,
            scratch.active,
        )  # fmt: skip
        _add_matrix_phase(
            counters, phase + 7, scratch.active, num_tokens, weights.down, layer,
            weights.down_bias, x, width,
        )  # fmt: skip
        rows = everything if layer + 1 < num_layers else step.logit_rows
        _norm_phase(counters, phase + 8, x, rows, weights.input_norms, layer + 1, eps, h)
    _matrix_phase(
        counters, 1 + PHASES_PER_LAYER * num_layers, h, step.logit_rows.shape[0], weights.head, 0,
        weights.head_bias, scratch.logits, scratch.logits.shape[1],
    )  # fmt: skip


@compiled(fast=False)
def linear_layers(weights, narrow, mixed, inner, sums, logits, counters):
    """Take part in the matrices of a pass and nothing else: what a pass is measured against.

    narrow [N, E], mixed [N, H * D], inner [N, F]; sums [N, widest output], logits as in `Scratch`.
    """
    num_rows, num_layers, width = narrow.shape[0], weights.qkv.shape[0], sums.shape[1]
    for layer in range(num_layers):
        phase = 1 + PHASES_PER_LAYER * layer
        _matrix_phase(
            counters, phase, narrow, num_rows, weights.qkv, layer, weights.qkv_bias, sums, width
        )
        _matrix_phase(
            counters, phase + 1, mixed, num_rows, weights.out, layer, weights.out_bias, sums, width
        )
        _matrix_phase(
            counters, phase + 2, narrow, num_rows, weights.gate_up, layer, weights.gate_up_bias,
            sums, width,
        )  # fmt: skip
        _matrix_phase(
            counters, phase + 3, inner, num_rows, weights.down, layer, weights.down_bias, sums,
            width,
        )  # fmt: skip
    _matrix_phase(
        counters, 1 + PHASES_PER_LAYER * num_layers, narrow, num_rows, weights.head, 0,
        weights.head_bias, logits, logits.shape[1],
    )  # fmt: skip
