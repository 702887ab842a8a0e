"""Attention of a ragged batch over the paged cache, in three passes over its parts.

    rotate   per token: rotary embedding of q and k (after their norms, where a model has them),
             keys and values written into their cache slots
    attend   per (rows of one request, KV head, segment of 256 positions): partial softmax
    merge    per (token, head): the segments' partial results, in ascending order

What a row computes depends on its own position and on fixed segments of 256 positions, never
on its neighbours in the batch: from the same inputs a row gets the same bits alone, among drafts
and among strangers.

A node of a draft tree is a unit of its own. The blocks in which its tree lies it reads from copies
in which its own path lies in order (`_straighten`), so it too gets the bits of plain decoding.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from .compiling import FAST, compiled
from .pointwise import exp_negative
from .softmax import LOWEST, largest, soften
from .tiles import KEY_BLOCK, TILE_ROWS, score_tile, value_tile
from .vector import narrow, settle, widen

__all__ = [
    "SEGMENT",
    "attend",
    "attend_unit",
    "merge",
    "merge_parallel",
    "merge_token",
    "plan_units",
    "rotate",
    "rotate_parallel",
    "rotate_token",
]

SEGMENT = 256  # positions whose partial softmax is one unit of work
_LOWEST = np.float32(LOWEST)


@njit(inline="always")
def _norm_scale(row, start, size, weight, eps):
    """Reciprocal root mean square of a head, or 1 where the model has no q/k norms."""
    if weight.shape[0] == 0:
        return np.float32(1)
    total = np.float32(0)
    for i in range(size):
        total += widen(row[start + i]) * widen(row[start + i])
    return np.float32(1) / np.float32(math.sqrt(total / np.float32(size) + eps))


@njit(inline="always")
def _normed(row, start, i, weight, scale):
    value = widen(row[start + i])
    if weight.shape[0] == 0:
        return value
    return widen(narrow(widen(narrow(value * scale, row)) * widen(weight[i]), row))


@njit(nogil=True)
def rotate_token(t, qkv, cos, sin, q_norm, k_norm, eps, positions, slots, keys, values, queries):
    """Do for one token what `rotate` does for a step.

    No fast mathematics: compiled into two kernels, it must round alike in both.
    """
    groups, pack = keys.shape[1], keys.shape[4]
    size = keys.shape[2] * pack
    half = size // 2
    heads = qkv.shape[1] // size - 2 * groups
    share = heads // groups
    root = np.float32(1.0 / math.sqrt(size))
    row = qkv[t]
    p, block, offset = positions[t], slots[t] // KEY_BLOCK, slots[t] % KEY_BLOCK
    for h in range(heads):
        start, target = h * size, queries[h // share, t * share + h % share]
        scale = _norm_scale(row, start, size, q_norm, eps)
        for i in range(half):
            a = _normed(row, start, i, q_norm, scale)
            b = _normed(row, start, half + i, q_norm, scale)
            target[i] = widen(narrow(a * cos[p, i] - b * sin[p, i], row)) * root
            target[half + i] = widen(narrow(b * cos[p, i] + a * sin[p, i], row)) * root
    for g in range(groups):
        start = (heads + g) * size
        scale = _norm_scale(row, start, size, k_norm, eps)
        for i in range(half):
            a = _normed(row, start, i, k_norm, scale)
            b = _normed(row, start, half + i, k_norm, scale)
            j = half + i
            keys[block, g, i // pack, offset, i % pack] = narrow(a * cos[p, i] - b * sin[p, i], row)
            keys[block, g, j // pack, offset, j % pack] = narrow(b * cos[p, i] + a * sin[p, i], row)
        start = (heads + groups + g) * size
        for i in range(size):
            values[block, g, offset // pack, i, offset % pack] = row[start + i]


@compiled(fast=False)
def rotate(qkv, cos, sin, q_norm, k_norm, eps, positions, slots, keys, values, queries):
    """Write a step's keys and values into the cache, and its rotated queries into `queries`.

    qkv [N, (H + 2G) * D]; cos, sin [positions, D/2] float32; q_norm, k_norm [D] or empty;
    positions [N]; slots [N] = block * block_size + offset; keys, values: one layer of the
    cache; queries [G, N * H/G + padding, D] float32, scaled by 1 / sqrt(D).
    """
    for t in range(qkv.shape[0]):
        rotate_token(t, qkv, cos, sin, q_norm, k_norm, eps, positions, slots, keys, values, queries)


@compiled(fast=False, parallel=True)
def rotate_parallel(qkv, cos, sin, q_norm, k_norm, eps, positions, slots, keys, values, queries):
    """Do what `rotate` does, over all threads: worth it for a piece of a prompt."""
    for t in prange(qkv.shape[0]):
        rotate_token(t, qkv, cos, sin, q_norm, k_norm, eps, positions, slots, keys, values, queries)


@njit(nogil=True)
def _straighten(keys, values, table, g, branch_at, position, path, own_keys, own_values):
    """Copy one head's blocks from that of position `branch_at` on as a node of a tree sees them.

    Positions before `branch_at` lie where they should; those from there on at `path`'s places.
    What lies behind `position` becomes zeros. own_keys, own_values [blocks, 1, ...].
    """
    parts, pack, size = keys.shape[2], keys.shape[4], values.shape[3]
    first = branch_at // KEY_BLOCK
    for j in range(own_keys.shape[0]):
        for offset in range(KEY_BLOCK):
            p = (first + j) * KEY_BLOCK + offset
            if p > position:
                for i in range(parts):
                    for e in range(pack):
                        own_keys[j, 0, i, offset, e] = 0
                for i in range(size):
                    own_values[j, 0, offset // pack, i, offset % pack] = 0
                continue
            place = p if p < branch_at else path[p - branch_at]
            block, at = table[place // KEY_BLOCK], place % KEY_BLOCK
            for i in range(parts):
                for e in range(pack):
                    own_keys[j, 0, i, offset, e] = keys[block, g, i, at, e]
            for i in range(size):
                value = values[block, g, at // pack, i, at % pack]
                own_values[j, 0, offset // pack, i, offset % pack] = value


@njit(fastmath=FAST, nogil=True)
def attend_unit(
    u, queries, keys, values, tables, positions, units, window, branch_at, paths, partial, tops,
    totals,
):  # fmt: skip
    """Do for unit u // G and KV head u % G what `attend` does for all of them."""
    groups, pack = keys.shape[1], keys.shape[4]
    size = keys.shape[2] * pack
    block_elements = size * KEY_BLOCK
    share = (queries.shape[1] - TILE_ROWS) // positions.shape[0]
    unit, g = units[u // groups], u % groups
    request, first, segment = unit[0], unit[1], unit[3]
    rows = (unit[2] - first) * share
    padded = (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    base, start = unit[4] + g * padded, segment * SEGMENT
    scores = np.zeros(TILE_ROWS * SEGMENT, np.float32)
    # Blocks from here on are read from copies: of ordinary rows none.
    own_block = branch_at[first] // KEY_BLOCK
    own_keys, own_values = keys[:0], values[:0]
    if branch_at[first] <= positions[first]:
        own_keys, own_values = _own_blocks(
            keys, values, tables[request], g, branch_at[first], positions[first], paths[first]
        )
    else:
        own_block = positions[unit[2] - 1] + 1
    own_block -= start // KEY_BLOCK  # counted from the segment's first block
    for x in range(0, padded, TILE_ROWS):
        last_row = min(x + TILE_ROWS, rows) - 1
        newest, oldest = positions[first + last_row // share], positions[first + x // share]
        end = min(SEGMENT, newest + 1 - start)
        begin = max(0, oldest + 1 - window - start)
        # A tile may see nothing of the segment: too old for it, or past its window.
        end_block = max(0, (end + KEY_BLOCK - 1) // KEY_BLOCK)
        first_block = min(begin // KEY_BLOCK, end_block)
        shared_end = max(first_block, min(end_block, own_block))
        for n in range(first_block, shared_end):
            block = tables[request, start // KEY_BLOCK + n] * groups + g
            near = tables[request, start // KEY_BLOCK + min(n + 1, shared_end - 1)] * groups + g
            score_tile(
                scores, n * KEY_BLOCK, SEGMENT, queries,
                (g * queries.shape[1] + first * share + x) * size, size,
                keys, block * block_elements, KEY_BLOCK * pack, size,
                near * block_elements, values, block * block_elements,
            )  # fmt: skip
        for n in range(shared_end, end_block):
            own = (n - own_block) * block_elements
            score_tile(
                scores, n * KEY_BLOCK, SEGMENT, queries,
                (g * queries.shape[1] + first * share + x) * size, size,
                own_keys, own, KEY_BLOCK * pack, size, own, own_values, own,
            )  # fmt: skip
        at, width = first_block * KEY_BLOCK, (end_block - first_block) * KEY_BLOCK
        for r in range(TILE_ROWS):
            row = base + x + r
            for i in range(size):
                partial[row, i] = np.float32(0)
            low, high = 0, 0  # positions of the segment that this row sees
            if x + r < rows:
                p = positions[first + (x + r) // share]
                high = max(0, min(SEGMENT, p + 1 - start))
                low = min(high, max(0, p + 1 - window - start))
            for j in range(at, low):
                scores[r * SEGMENT + j] = _LOWEST
            for j in range(high, at + width):
                scores[r * SEGMENT + j] = _LOWEST
            tops[row] = largest(scores, r * SEGMENT + at, width)
            totals[row] = soften(scores, r * SEGMENT + at, width, tops[row])
            if low == high:
                totals[row] = np.float32(0)
        for n in range(first_block, shared_end):
            block = tables[request, start // KEY_BLOCK + n] * groups + g
            for d in range(0, size, 32):
                value_tile(
                    partial, (base + x) * size + d, size, scores, n * KEY_BLOCK, SEGMENT,
                    values, block * block_elements + d * pack, size * pack, KEY_BLOCK,
                )  # fmt: skip
        for n in range(shared_end, end_block):
            own = (n - own_block) * block_elements
            for d in range(0, size, 32):
                value_tile(
                    partial, (base + x) * size + d, size, scores, n * KEY_BLOCK, SEGMENT,
                    own_values, own + d * pack, size * pack, KEY_BLOCK,
                )  # fmt: skip


@njit(nogil=True)
def _own_blocks(keys, values, table, g, branch_at, position, path):
    """Make the copies that a node of a tree reads: see `_straighten`."""
    count = position // KEY_BLOCK - branch_at // KEY_BLOCK + 1
    own_keys = np.empty((count, 1, keys.shape[2], keys.shape[3], keys.shape[4]), keys.dtype)
    own_values = np.empty(
        (count, 1, values.shape[2], values.shape[3], values.shape[4]), values.dtype
    )
    _straighten(keys, values, table, g, branch_at, position, path, own_keys, own_values)
    return own_keys, own_values


@compiled(parallel=True)
def attend(
    queries, keys, values, tables, positions, units, window, branch_at, paths, partial, tops, totals
):
    """Compute the partial softmax of each unit of work.

    units [U, 5] int64: request, first token, end token, segment, first row of its results in
    `partial` [rows, D], `tops` and `totals` [rows] (all float32); a unit has G times
    ceil((end - first) * H/G / 4) * 4 rows. `window` counts the positions that a token sees.
    branch_at [N], paths [N, D]: see `types.TreeRows`.
    """
    for u in prange(units.shape[0] * keys.shape[1]):
        attend_unit(
            u, queries, keys, values, tables, positions, units, window, branch_at, paths, partial,
            tops, totals,
        )  # fmt: skip


@njit(fastmath=FAST, nogil=True)
def merge_token(t, units, token_units, groups, share, partial, tops, totals, like, out):
    """Do for one token what `merge` does for a step; results are rounded to `like`'s format."""
    size = partial.shape[1]
    mixed = np.zeros(size, np.float32)
    for h in range(groups * share):
        g = h // share
        top, total = _LOWEST, np.float32(0)
        for u in range(token_units[t, 0], token_units[t, 1]):
            first, end = units[u, 1], units[u, 2]
            padded = ((end - first) * share + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
            row = units[u, 4] + g * padded + (t - first) * share + h % share
            if totals[row] == 0:
                continue
            higher = max(top, tops[row])
            fade, gain = exp_negative(top - higher), exp_negative(tops[row] - higher)
            if total == 0:
                fade = np.float32(0)
            for i in range(size):
                mixed[i] = mixed[i] * fade + partial[row, i] * gain
            total = total * fade + totals[row] * gain
            top = higher
        inverse = np.float32(1) / total
        for i in range(size):
            out[t, h * size + i] = narrow(settle(mixed[i] * inverse, like), out)


@compiled()
def merge(units, token_units, groups, share, partial, tops, totals, out):
    """Add up each row's segments in ascending order. token_units [N, 2]: its first and end unit."""
    for t in range(token_units.shape[0]):
        merge_token(t, units, token_units, groups, share, partial, tops, totals, out, out)


@compiled(parallel=True)
def merge_parallel(units, token_units, groups, share, partial, tops, totals, out):
    """Do what `merge` does, over all threads: worth it for a piece of a prompt."""
    for t in prange(token_units.shape[0]):
        merge_token(t, units, token_units, groups, share, partial, tops, totals, out, out)


@compiled(fast=False)
def plan_units(starts, positions, branch_at, share, groups, max_tokens):
    """Cut a step into units of work: (units [U, 5], token_units [N, 2], rows of results).

    A unit holds at most `max_tokens` tokens of one request and one segment, and a node of a tree
    has its own. See `attend`.
    """
    num_units = 0
    for b in range(starts.shape[0] - 1):
        first = starts[b]
        while first < starts[b + 1]:
            end = _unit_end(first, starts[b + 1], positions, branch_at, max_tokens)
            num_units += positions[end - 1] // SEGMENT + 1
            first = end
    units = np.empty((num_units, 5), np.int64)
    token_units = np.empty((positions.shape[0], 2), np.int64)
    u, row = 0, 0
    for b in range(starts.shape[0] - 1):
        first = starts[b]
        while first < starts[b + 1]:
            end = _unit_end(first, starts[b + 1], positions, branch_at, max_tokens)
            num_segments = positions[end - 1] // SEGMENT + 1
            for t in range(first, end):
                token_units[t, 0], token_units[t, 1] = u, u + num_segments
            padded = ((end - first) * share + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
            for segment in range(num_segments):
                units[u, 0], units[u, 1], units[u, 2] = b, first, end
                units[u, 3], units[u, 4] = segment, row
                row += groups * padded
                u += 1
            first = end
    return units, token_units, row


@njit(inline="always")
def _unit_end(first, most, positions, branch_at, max_tokens):
    """Say where the unit that begins with token `first` ends."""
    if branch_at[first] <= positions[first]:
        return first + 1
    end = first + 1
    while end < min(first + max_tokens, most) and branch_at[end] > positions[end]:
        end += 1
    return end
