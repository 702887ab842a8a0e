"""One whole pass of a decoder in one call: every layer's phases, shared by the threads there are.

Between its layers a pass would otherwise go back to Python some two hundred times and wake the
other threads as often, which costs more than all norms and activations together. Here a pass is one
parallel section; `team` says how its parts are shared.

    embed      tokens to rows of x, normed to h; a draft head's layer is given its rows (`given`)
    qkv        h to queries, keys, values
    rotate     positions into queries and keys; keys and values into the cache
    attend     partial softmax of (rows, KV head, segment of 256 positions)
    merge      segments of a token's heads to `mixed`
    out        mixed, projected, added to x
    norm       x to h
    gate_up    h to silu(gate) * up, `active`
    round      active to whole numbers, for weights of eight bits (`integers`)
    down       active, projected, added to x
    keep       x to `kept`, of layers whose states drafters read
    next       x to h for the next layer, or for the vocabulary those rows that are asked for
    head       to logits

Rounding follows the published models in a 16-bit format: what they store is rounded when they store
it. Logits alone stay float32, as the sums gave them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import njit
from numpy.typing import NDArray

from .attention import attend_unit, merge_token, rotate_token
from .compiling import compiled
from .phases import (
    add_matrix_phase,
    choose,
    chunk_of,
    gate_phase,
    matrix_phase,
    prepare,
    round_phase,
)
from .rows import embed_token, norm_row
from .team import finish, take
from .tiles import TILE_ROWS
from .vector import widen

__all__ = [
    "Scratch",
    "Step",
    "Weights",
    "forward",
    "linear_layers",
    "num_phases",
]

PHASES_PER_LAYER = 11
FIRST_PHASES = 3  # before the layers

Array = NDArray[Any]


class Weights(NamedTuple):
    """A model's weights; matrices in panels (`matrix`), other numbers in the storage format."""

    embedding: Array  # [1, panels, .., 16]: token t is output t
    embedding_scales: Array
    qkv: Array  # [layers, panels, .., 16]
    qkv_bias: Array  # [layers, outputs] float32, like all biases; zeros where a model has none
    qkv_scales: Array  # [layers, outputs] float32 of 8-bit weights; else [layers, 0]
    out: Array
    out_bias: Array
    out_scales: Array
    gate_up: Array  # all gates' panels, then all ups'
    gate_up_bias: Array
    gate_up_scales: Array
    down: Array
    down_bias: Array
    down_scales: Array
    head: Array  # [1, panels, .., 16]
    head_bias: Array
    head_scales: Array
    input_norms: Array  # [layers + 1, E]; the last one is the final norm
    skips_norm: Array  # [layers + 1] bool: where a head has none of these, and takes x as it is
    mlp_norms: Array  # [layers, E]
    q_norms: Array  # [layers, D], or [layers, 0] where a model has none
    k_norms: Array
    fc: Array  # of an EAGLE-1 head, [1, panels, .., 16]: `given` to x; [1, 0, .., 16]: none
    fc_bias: Array
    fc_scales: Array
    windows: Array  # [layers] int64: positions that a token sees
    cos: Array  # [positions, D / 2] float32
    sin: Array


class Step(NamedTuple):
    """The tokens of a pass, see `attention`."""

    tokens: Array  # [N] int64
    positions: Array  # [N] int64
    branch_at: Array  # [N] int64
    paths: Array  # [N, D] int64
    slots: Array  # [N] int64
    tables: Array  # [B, max_blocks] int64
    units: Array  # [U, 5] int64
    token_units: Array  # [N, 2] int64
    logit_rows: Array  # [M] int64
    kept_layers: Array  # [K] int64: the residual stream after so many layers is kept


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
    kept: Array  # [K, N, E], as x
    whole_h: Array  # for 8-bit weights h, mixed, active as whole numbers, int16; else empty
    whole_mixed: Array
    whole_active: Array
    row_scales: Array  # [max(N, M)] float32
    counters: Array  # [phases, 16] int64 zeros


def num_phases(num_layers: int) -> int:
    """Count the phases of a pass: some to begin with, those of the layers, one to end."""
    return FIRST_PHASES + PHASES_PER_LAYER * num_layers + 1


@njit(inline="always")
def _embed_phase(counters, phase, weights, step, scratch, eps):
    num_tokens, mine = step.tokens.shape[0], 0
    x, h = scratch.x, scratch.h
    chunk = chunk_of(num_tokens)
    parts = (num_tokens + chunk - 1) // chunk
    part = take(counters, phase)
    while part < parts:
        for t in range(part * chunk, min(num_tokens, (part + 1) * chunk)):
            embed_token(step.tokens[t], weights.embedding, weights.embedding_scales, x, t)
            norm_row(x, t, weights.input_norms, 0, eps, h, t)
            prepare(h, t, scratch.whole_h, scratch.row_scales, weights.qkv)
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@njit(inline="always")
def _norm_phase(counters, phase, rows, norms, layer, eps, scratch, packed, skip):
    """Norm the rows named by `rows`, one after the other into h; `skip`: take them as they are."""
    num_rows, mine = rows.shape[0], 0
    chunk = chunk_of(num_rows)
    parts = (num_rows + chunk - 1) // chunk
    part = take(counters, phase)
    while part < parts:
        for m in range(part * chunk, min(num_rows, (part + 1) * chunk)):
            if skip:
                for i in range(scratch.x.shape[1]):
                    scratch.h[m, i] = widen(scratch.x[rows[m], i])
            else:
                norm_row(scratch.x, rows[m], norms, layer, eps, scratch.h, m)
            prepare(scratch.h, m, scratch.whole_h, scratch.row_scales, packed)
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@njit(inline="always")
def _rotate_phase(counters, phase, weights, step, layer, eps, qkv, keys, values, queries):
    num_tokens, mine = step.tokens.shape[0], 0
    chunk = chunk_of(num_tokens)
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
            step.branch_at, step.paths, scratch.partial, scratch.tops, scratch.totals,
        )  # fmt: skip
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@njit(inline="always")
def _merge_phase(counters, phase, step, share, keys, scratch, packed):
    num_tokens, mine = step.tokens.shape[0], 0
    chunk = chunk_of(num_tokens)
    parts = (num_tokens + chunk - 1) // chunk
    part = take(counters, phase)
    while part < parts:
        for t in range(part * chunk, min(num_tokens, (part + 1) * chunk)):
            merge_token(
                t, step.units, step.token_units, keys.shape[1], share, scratch.partial,
                scratch.tops, scratch.totals, keys, scratch.mixed,
            )  # fmt: skip
            prepare(scratch.mixed, t, scratch.whole_mixed, scratch.row_scales, packed)
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@njit(inline="always")
def _keep_phase(counters, phase, step, layers_done, scratch):
    """Copy x where its state after so many layers is wanted; others have nothing to wait for."""
    num_tokens, mine = step.tokens.shape[0], 0
    chunk = chunk_of(num_tokens)
    parts = (num_tokens + chunk - 1) // chunk
    for k in range(step.kept_layers.shape[0]):
        if step.kept_layers[k] == layers_done:
            part = take(counters, phase)
            while part < parts:
                for t in range(part * chunk, min(num_tokens, (part + 1) * chunk)):
                    for i in range(scratch.x.shape[1]):
                        scratch.kept[k, t, i] = scratch.x[t, i]
                mine += 1
                part = take(counters, phase)
            finish(counters, phase, mine, parts)


@compiled(fast=False)
def forward(weights, step, scratch, given, all_keys, all_values, eps, everything):
    """Take part in a pass until it is done.

    all_keys, all_values [layers, ...]: the cache's tensors; eps: float32 of the norms;
    `everything` names all rows, 0..N-1. A draft head's layer begins with `given` [N, I] float32
    (empty for a model): what fc projects to x, or without fc what the first projection reads beside
    the x that scratch holds.
    """
    counters, x, row_scales = scratch.counters, scratch.x, scratch.row_scales
    num_tokens, num_layers = step.tokens.shape[0], weights.qkv.shape[0]
    share = (scratch.queries.shape[1] - TILE_ROWS) // num_tokens
    width = x.shape[1]
    h = choose(scratch.h, scratch.whole_h, weights.qkv)
    first = choose(given, scratch.whole_h, weights.qkv)
    is_head, has_fc = given.shape[0] > 0, weights.fc.shape[1] > 0
    mixed = choose(scratch.mixed, scratch.whole_mixed, weights.out)
    active = choose(scratch.active, scratch.whole_active, weights.down)
    if not is_head:
        _embed_phase(counters, 0, weights, step, scratch, eps)
    elif has_fc:
        matrix_phase(
            counters, 0, first, row_scales, num_tokens, weights.fc, weights.fc_scales, 0,
            weights.fc_bias, x, width,
        )  # fmt: skip
        _norm_phase(
            counters, 1, everything, weights.input_norms, 0, eps, scratch, weights.qkv,
            weights.skips_norm[0],
        )  # fmt: skip
    _keep_phase(counters, 2, step, 0, scratch)
    for layer in range(num_layers):
        phase = FIRST_PHASES + PHASES_PER_LAYER * layer
        keys, values = all_keys[layer], all_values[layer]
        matrix_phase(
            counters, phase, first if is_head and not has_fc else h, row_scales, num_tokens,
            weights.qkv, weights.qkv_scales, layer, weights.qkv_bias, scratch.qkv,
            scratch.qkv.shape[1],
        )  # fmt: skip
        _rotate_phase(
            counters, phase + 1, weights, step, layer, eps, scratch.qkv, keys, values,
            scratch.queries,
        )  # fmt: skip
        _attend_phase(counters, phase + 2, step, weights.windows[layer], keys, values, scratch)
        _merge_phase(counters, phase + 3, step, share, keys, scratch, weights.out)
        add_matrix_phase(
            counters, phase + 4, mixed, row_scales, num_tokens, weights.out, weights.out_scales,
            layer, weights.out_bias, x, width,
        )  # fmt: skip
        _norm_phase(
            counters, phase + 5, everything, weights.mlp_norms, layer, eps, scratch,
            weights.gate_up, False,
        )  # fmt: skip
        gate_phase(
            counters, phase + 6, h, row_scales, num_tokens, weights.gate_up,
            weights.gate_up_scales, layer, weights.gate_up_bias, x, scratch.active,
        )  # fmt: skip
        round_phase(counters, phase + 7, num_tokens, scratch, weights.down)
        add_matrix_phase(
            counters, phase + 8, active, row_scales, num_tokens, weights.down,
            weights.down_scales, layer, weights.down_bias, x, width,
        )  # fmt: skip
        _keep_phase(counters, phase + 9, step, layer + 1, scratch)
        rows = everything if layer + 1 < num_layers else step.logit_rows
        _norm_phase(
            counters, phase + 10, rows, weights.input_norms, layer + 1, eps, scratch, weights.head,
            weights.skips_norm[layer + 1],
        )  # fmt: skip
    matrix_phase(
        counters, FIRST_PHASES + PHASES_PER_LAYER * num_layers, h, row_scales,
        step.logit_rows.shape[0], weights.head, weights.head_scales, 0, weights.head_bias,
        scratch.logits, scratch.logits.shape[1],
    )  # fmt: skip


@compiled(fast=False)
def linear_layers(weights, narrow, mixed, inner, row_scales, sums, logits, counters):
    """Take part in the matrices of a pass and nothing else: what a pass is measured against.

    narrow [N, E], mixed [N, H * D], inner [N, F], as products read them; row_scales [N];
    sums [N, widest output], logits as in `Scratch`.
    """
    num_rows, num_layers, width = narrow.shape[0], weights.qkv.shape[0], sums.shape[1]
    for layer in range(num_layers):
        phase = 1 + PHASES_PER_LAYER * layer
        matrix_phase(
            counters, phase, narrow, row_scales, num_rows, weights.qkv, weights.qkv_scales, layer,
            weights.qkv_bias, sums, width,
        )  # fmt: skip
        matrix_phase(
            counters, phase + 1, mixed, row_scales, num_rows, weights.out, weights.out_scales,
            layer, weights.out_bias, sums, width,
        )  # fmt: skip
        matrix_phase(
            counters, phase + 2, narrow, row_scales, num_rows, weights.gate_up,
            weights.gate_up_scales, layer, weights.gate_up_bias, sums, width,
        )  # fmt: skip
        matrix_phase(
            counters, phase + 3, inner, row_scales, num_rows, weights.down, weights.down_scales,
            layer, weights.down_bias, sums, width,
        )  # fmt: skip
    matrix_phase(
        counters, 1 + PHASES_PER_LAYER * num_layers, narrow, row_scales, num_rows, weights.head,
        weights.head_scales, 0, weights.head_bias, logits, logits.shape[1],
    )  # fmt: skip
