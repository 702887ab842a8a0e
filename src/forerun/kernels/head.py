"""One pass of an EAGLE head in one call: its inputs, one decoder layer, the draft vocabulary.

    gather     embeddings of tokens; target states, normed where the head norms them, to `wide`
    fc         wide, projected, to x: skipped where a pass continues the head's own states
    ready      what attention's projection reads, to `paired`; the residual to x
    qkv .. down   as in a decoder's layer (`forward`)
    last       x of the rows asked for to h: normed, or as it is
    head       h to logits of the draft vocabulary

Sums are taken in the order of the target's passes, so drafts do not depend on their company.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .compiling import FAST, compiled
from .forward import attend_phase, embed_token, merge_phase, norm_phase, rotate_phase
from .phases import add_matrix_phase, chunk_of, gate_phase, matrix_phase
from .team import finish, take
from .tiles import TILE_ROWS
from .vector import narrow, settle, widen

__all__ = [
    "NUM_EAGLE_PHASES",
    "EagleScratch",
    "EagleWeights",
    "eagle_pass",
    "medusa_pass",
]

NUM_EAGLE_PHASES = 13

Array = NDArray[Any]


class EagleWeights(NamedTuple):
    """A head's weights; matrices in panels, one layer each; norms [1, n] or [1, 0]: none."""

    embedding: Array
    embedding_scales: Array
    fc: Array
    fc_bias: Array
    fc_norm: Array  # [1, inputs]: the norms of all parts one after the other
    embed_norm: Array  # EAGLE-3's
    state_norm: Array  # of what attention reads: EAGLE-3's hidden_norm, EAGLE-1's input norm
    qkv: Array
    qkv_bias: Array
    out: Array
    out_bias: Array
    mlp_norms: Array
    gate_up: Array
    gate_up_bias: Array
    down: Array
    down_bias: Array
    last_norms: Array
    head: Array
    head_bias: Array
    q_norms: Array
    k_norms: Array
    no_scales: Array  # [1, 0]: nothing here has eight bits
    cos: Array
    sin: Array


class EagleScratch(NamedTuple):
    """What a pass reads and writes, named as in `forward.Scratch`."""

    inputs: Array  # [N, I] stored: the target's states, or the head's own
    embedded: Array  # [N, E] stored
    wide: Array  # [N, inputs of fc] float32
    states: Array  # [N, E] stored, what fc gives; the inputs themselves where it is skipped
    paired: Array  # [N, E or 2 E] float32
    x: Array  # [N, E] stored, the residual stream: at the end the head's states
    h: Array  # [max(N, M), E] float32
    qkv: Array
    queries: Array
    partial: Array
    tops: Array
    totals: Array
    mixed: Array
    active: Array
    logits: Array  # [M, panels * 16]
    whole_h: Array  # empty, like these three: nothing here has eight bits
    whole_mixed: Array
    whole_active: Array
    row_scales: Array
    counters: Array  # [NUM_EAGLE_PHASES, 16] int64 zeros


@njit(fastmath=FAST, nogil=True)
def _norm_part(x, t, at, width, weights, eps, like, out, out_at):
    """out[t, out_at:] = RMSNorm(x[t, at:at + width]) * weights, rounded as `like` is stored."""
    total = np.float32(0)
    for i in range(width):
        value = widen(x[t, at + i])
        total += value * value
    scale = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(width) + eps))
    for i in range(width):
        normed = settle(widen(x[t, at + i]) * scale, like)
        out[t, out_at + i] = settle(normed * widen(weights[0, at + i]), like)


@njit(nogil=True)
def _gather(t, step, weights, joins, part, eps, scratch):
    """Fill `embedded` and `wide` for one token; `part` inputs share a norm, 0: no norm."""
    embed_token(step.tokens[t], weights.embedding, weights.embedding_scales, scratch.embedded, t)
    size, count = scratch.embedded.shape[1], scratch.inputs.shape[1]
    at = 0
    if joins:  # EAGLE-1: the embedding comes first
        for i in range(size):
            scratch.wide[t, i] = widen(scratch.embedded[t, i])
        at = size
    if part:
        for first in range(0, count, part):
            _norm_part(
                scratch.inputs, t, first, part, weights.fc_norm, eps, scratch.x, scratch.wide, first
            )
    elif scratch.wide.shape[1]:
        for i in range(count):
            scratch.wide[t, at + i] = widen(scratch.inputs[t, i])


@njit(nogil=True)
def _ready(t, weights, joins, normed_residual, eps, scratch):
    """Fill `paired` and x for one token."""
    size = scratch.x.shape[1]
    at = 0 if joins else size
    if not joins:
        _norm_part(
            scratch.embedded, t, 0, size, weights.embed_norm, eps, scratch.x, scratch.paired, 0
        )
    if weights.state_norm.shape[1]:
        _norm_part(
            scratch.states, t, 0, size, weights.state_norm, eps, scratch.x, scratch.paired, at
        )
    else:
        for i in range(size):
            scratch.paired[t, at + i] = widen(scratch.states[t, i])
    for i in range(size):
        if normed_residual:
            scratch.x[t, i] = narrow(scratch.paired[t, at + i], scratch.x)
        else:
            scratch.x[t, i] = scratch.states[t, i]


@njit(inline="always")
def _last_phase(counters, phase, rows, scratch):
    """Take the rows asked for to h, one after the other: as they are where there is no norm."""
    num_rows, mine = rows.shape[0], 0
    chunk = chunk_of(num_rows)
    parts = (num_rows + chunk - 1) // chunk
    part = take(counters, phase)
    while part < parts:
        for m in range(part * chunk, min(num_rows, (part + 1) * chunk)):
            for i in range(scratch.x.shape[1]):
                scratch.h[m, i] = widen(scratch.x[rows[m], i])
        mine += 1
        part = take(counters, phase)
    finish(counters, phase, mine, parts)


@compiled(fast=False)
def eagle_pass(
    weights, step, scratch, keys, values, eps, everything, window, joins, has_fc, part,
    normed_residual,
):  # fmt: skip
    """Take part in a pass until it is done.

    keys, values: the head's cache, one layer of `KVCache`'s; `joins`: EAGLE-1, whose fc reads the
    embedding beside the state; `has_fc`: whether fc is applied (else `states` are `inputs`); `part`
    inputs share one of fc's norms, 0: none; `normed_residual`: see `EagleConfig`.
    """
    counters, row_scales, none = scratch.counters, scratch.row_scales, weights.no_scales
    num_tokens, mine = step.tokens.shape[0], 0
    share = (scratch.queries.shape[1] - TILE_ROWS) // num_tokens
    width = scratch.x.shape[1]
    chunk = chunk_of(num_tokens)
    parts = (num_tokens + chunk - 1) // chunk
    number = take(counters, 0)
    while number < parts:
        for t in range(number * chunk, min(num_tokens, (number + 1) * chunk)):
            _gather(t, step, weights, joins, part, eps, scratch)
        mine += 1
        number = take(counters, 0)
    finish(counters, 0, mine, parts)
    if has_fc:
        matrix_phase(
            counters, 1, scratch.wide, row_scales, num_tokens, weights.fc, none, 0,
            weights.fc_bias, scratch.states, width,
        )  # fmt: skip
    mine = 0
    number = take(counters, 2)
    while number < parts:
        for t in range(number * chunk, min(num_tokens, (number + 1) * chunk)):
            _ready(t, weights, joins, normed_residual, eps, scratch)
        mine += 1
        number = take(counters, 2)
    finish(counters, 2, mine, parts)
    matrix_phase(
        counters, 3, scratch.paired, row_scales, num_tokens, weights.qkv, none, 0,
        weights.qkv_bias, scratch.qkv, scratch.qkv.shape[1],
    )  # fmt: skip
    rotate_phase(counters, 4, weights, step, 0, eps, scratch.qkv, keys, values, scratch.queries)
    attend_phase(counters, 5, step, window, keys, values, scratch)
    merge_phase(counters, 6, step, share, keys, scratch, weights.out)
    add_matrix_phase(
        counters, 7, scratch.mixed, row_scales, num_tokens, weights.out, none, 0,
        weights.out_bias, scratch.x, width,
    )  # fmt: skip
    norm_phase(counters, 8, everything, weights.mlp_norms, 0, eps, scratch, weights.gate_up)
    gate_phase(
        counters, 9, scratch.h, row_scales, num_tokens, weights.gate_up, none, 0,
        weights.gate_up_bias, scratch.x, scratch.active,
    )  # fmt: skip
    add_matrix_phase(
        counters, 10, scratch.active, row_scales, num_tokens, weights.down, none, 0,
        weights.down_bias, scratch.x, width,
    )  # fmt: skip
    if step.logit_rows.shape[0]:
        if weights.last_norms.shape[1]:
            norm_phase(
                counters, 11, step.logit_rows, weights.last_norms, 0, eps, scratch, weights.head
            )
        else:
            _last_phase(counters, 11, step.logit_rows, scratch)
        matrix_phase(
            counters, 12, scratch.h, row_scales, step.logit_rows.shape[0], weights.head, none, 0,
            weights.head_bias, scratch.logits, scratch.logits.shape[1],
        )  # fmt: skip


@compiled(fast=False)
def medusa_pass(x, blocks, biases, head, head_bias, no_scales, sums, rows, logits, counters):
    """Run residual blocks of some heads over the same rows, then one vocabulary for all of them.

    x [N, E] float32, what the target's vocabulary projection read; blocks [H * B, ...] in panels,
    head by head; sums [N, E] as stored; rows [H * N, E] float32, the blocks' results head by head;
    counters [(2 * B) * H + 1, 16].
    """
    num_rows, width = x.shape[0], x.shape[1]
    num_heads = rows.shape[0] // num_rows
    num_blocks = blocks.shape[0] // num_heads
    phase = 0
    for i in range(num_heads):
        first = i * num_rows
        own = rows[first : first + num_rows]
        for b in range(num_blocks):
            source = x if b == 0 else own
            matrix_phase(
                counters, phase, source, no_scales[0], num_rows, blocks, no_scales,
                i * num_blocks + b, biases, sums, width,
            )  # fmt: skip
            parts, mine = num_rows, 0
            part = take(counters, phase + 1)
            while part < parts:
                for k in range(width):
                    z = widen(sums[part, k])
                    active = settle(z / (np.float32(1) + np.float32(math.exp(-z))), sums)
                    own[part, k] = settle(source[part, k] + active, sums)
                mine += 1
                part = take(counters, phase + 1)
            finish(counters, phase + 1, mine, parts)
            phase += 2
    matrix_phase(
        counters, phase, rows, no_scales[0], rows.shape[0], head, no_scales, 0, head_bias, logits,
        logits.shape[1],
    )  # fmt: skip
