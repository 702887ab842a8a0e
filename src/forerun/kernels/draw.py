"""Filtering and drawing, a row of logits at a time: the fast twin of `sampling.filters`.

A row stays in the processor's own cache, so main memory is read once. What is done once for every
column is the maximum and the odds; both cuts look at few candidates:

    top-k   the k-th largest of the groups' maxima is a lower bound of the k-th largest logit
    top-p   numbers whose weight is below (1 - p) / V of the total cannot matter: all of them
            together weigh less than what may be left out

A row's result depends on that row alone: rows share nothing but threads.
"""

from __future__ import annotations

import math

import numpy as np

from .compiling import compiled
from .odds import GROUP, collect_group, odds_group, probs_group, sum_group, top_group
from .select import COUNTS, WEIGHS, crossing
from .team import finish, take

__all__ = ["draw", "find_bad", "find_largest", "lowest_power", "weigh"]

UNIT = 2.0**42
LOG2_E = 1.4426950408889634
LAST_POWER = -42.5  # odds of 2 to less than this weigh 0
SLACK = 1e-3  # of a power of two, for the rounding of odds: no skipped group would have counted
NEG_INF = np.float32(-np.inf)
INF = np.float32(np.inf)
ONE = np.float32(1)


@compiled(fast=False)
def _workspace(size):
    """Make what one row at a time needs: tail, and maxima, sums, odds and candidates of a row."""
    groups = (size + GROUP - 1) // GROUP
    tail = np.empty(GROUP, np.float32)
    for i in range(GROUP):
        tail[i] = NEG_INF
    tops = np.empty(groups, np.float32)
    sums = np.empty(groups, np.int64)
    odds = np.empty(groups * GROUP, np.float32)
    candidates = np.empty(groups * GROUP, np.float32)
    return tail, tops, sums, odds, candidates


@compiled(fast=False)
def _find_top(logits, row, work):
    """Fill in the groups' maxima and the tail, and return the row's largest; NaN if one is NaN."""
    tail, tops = work[0], work[1]
    size = logits.shape[1]
    whole = size // GROUP
    for g in range(whole):
        tops[g] = top_group(logits, row * size + g * GROUP)
    if whole * GROUP < size:
        for i in range(whole * GROUP, size):
            tail[i - whole * GROUP] = logits[row, i]
        tops[whole] = top_group(tail, 0)
    top = NEG_INF
    for g in range(len(tops)):
        if not tops[g] <= top:
            top = tops[g]
        if math.isnan(top):
            break
    return top


@compiled(fast=False)
def _first_of(logits, row, top, tops):
    """Find the lowest column whose logit is `top`."""
    g = 0
    while tops[g] != top:
        g += 1
    column = g * GROUP
    while logits[row, column] != top:
        column += 1
    return column


@compiled(fast=False)
def _collect(values, start, tail, groups, lowest, tops, candidates):
    """Gather the numbers of a row that are not below `lowest`; skip groups by their maxima."""
    count = np.int64(0)
    for g in range(groups):
        if tops[g] >= lowest:
            if g == groups - 1 and len(tail):
                count = collect_group(tail, 0, lowest, INF, candidates, count)
            else:
                count = collect_group(values, start + g * GROUP, lowest, INF, candidates, count)
    return count


@compiled(fast=False)
def _top_k_cut(logits, row, top_k, top, work):
    """Find the k-th largest logit of a row; ties count one by one."""
    tail, tops, _, _, candidates = work
    size, groups = logits.shape[1], len(tops)
    if top_k <= 0 or top_k >= size:
        return NEG_INF
    bound = NEG_INF
    if top_k <= groups:
        for g in range(groups):
            candidates[g] = tops[g]
        bound = crossing(candidates, groups, NEG_INF, top, COUNTS, float(top_k))
    ending = tail if groups * GROUP > size else tail[:0]
    count = _collect(logits, row * size, ending, groups, bound, tops, candidates)
    return crossing(candidates, count, bound, top, COUNTS, float(top_k))


@compiled(fast=False)
def lowest_power(floor):
    """Find a power of two such that odds of less either weigh 0 or are below `floor`."""
    power = LAST_POWER
    if floor > 0:
        power = max(power, math.log2(floor) - SLACK)
    return np.float32(power)


@compiled(fast=False)
def _fill_odds(logits, row, top, rate, cut, floor, work):
    """Fill in the odds and the groups' sums of weights; return the total. Groups that weigh 0 are
    skipped: their odds are not written."""
    tail, tops, sums, odds = work[0], work[1], work[2], work[3]
    size, groups = logits.shape[1], len(tops)
    lowest = lowest_power(floor)
    total = np.int64(0)
    for g in range(groups):
        sums[g] = 0
        if tops[g] >= cut and (tops[g] - top) * rate >= lowest:
            at = g * GROUP
            if at + GROUP <= size:
                sums[g] = odds_group(logits, row * size + at, top, rate, cut, floor, odds, at)
            else:
                sums[g] = odds_group(tail, 0, top, rate, cut, floor, odds, at)
            total += sums[g]
    return total


@compiled(fast=False)
def _top_p_floor(size, top_p, floor, total, work):
    """Find the odds below which top-p cuts, and sum the groups anew; returns floor and total."""
    _, _, sums, odds, candidates = work
    lightest = math.floor((1.0 - top_p) * float(total) / size * (1.0 - 1e-6))
    lowest = np.float32(max(lightest, 1.0) / UNIT * (1.0 - 1e-6))
    count = np.int64(0)
    for g in range(len(sums)):
        if sums[g] > 0:
            count = collect_group(odds, g * GROUP, lowest, INF, candidates, count)
    last = crossing(candidates, count, lowest, ONE, WEIGHS, top_p * float(total))
    floor = max(floor, np.float32(np.float64(np.int64(last * UNIT)) / UNIT))
    total = np.int64(0)
    for g in range(len(sums)):
        if sums[g] > 0:
            sums[g] = sum_group(odds, g * GROUP, floor)
            total += sums[g]
    return floor, total


@compiled(fast=False)
def _shape(logits, row, temperature, top_k, top_p, min_p, work, shapes, totals, only):
    """Work out a row's distribution and fill in the workspace's sums and odds.

    A group whose sum is 0 has no odds, and odds below the floor count as 0. See `draw` for the
    outputs; a greedy row has no sums and odds.
    """
    top = _find_top(logits, row, work)
    only[row], totals[row] = 0, 0
    shapes[row, 0], shapes[row, 1], shapes[row, 2], shapes[row, 3] = top, ONE, NEG_INF, min_p
    if not math.isfinite(top):
        return
    if temperature == 0:
        only[row], totals[row] = _first_of(logits, row, top, work[1]), np.int64(UNIT)
        return
    cut = _top_k_cut(logits, row, top_k, top, work)
    rate = np.float32(LOG2_E / np.float64(temperature))
    floor = min_p
    total = _fill_odds(logits, row, top, rate, cut, floor, work)
    if top_p < 1:
        floor, total = _top_p_floor(logits.shape[1], top_p, floor, total, work)
    shapes[row, 1], shapes[row, 2], shapes[row, 3] = rate, cut, floor
    only[row], totals[row] = -1, total


@compiled(fast=False)
def _pick(uniform, floor, total, work):
    """Find the column that holds the fraction `uniform` of the total; never one of weight 0."""
    sums, odds = work[2], work[3]
    point = min(np.int64(uniform * np.float64(total)), total - 1)
    g = 0
    while sums[g] <= point:
        point -= sums[g]
        g += 1
    column = g * GROUP
    while True:
        weight = np.int64(odds[column] * np.float32(UNIT)) if odds[column] >= floor else 0
        if weight > point:
            return column
        point -= weight
        column += 1


@compiled(fast=False)
def _fill(array, row, begin, end, value):
    for column in range(begin, end):
        array[row, column] = value


@compiled(fast=False)
def _spread(probs, row, floor, total, work):
    """Write a row's probabilities."""
    sums, odds, ending = work[2], work[3], work[4]
    size, scale = probs.shape[1], 1.0 / np.float64(total)
    for g in range(len(sums)):
        at = g * GROUP
        end = min(at + GROUP, size)
        if sums[g] == 0:
            _fill(probs, row, at, end, np.float32(0))
        elif at + GROUP <= size:
            probs_group(odds, at, floor, scale, probs, row * size + at)
        else:
            probs_group(odds, at, floor, scale, ending, 0)
            for column in range(at, end):
                probs[row, column] = ending[column - at]


@compiled(fast=False)
def draw(
    logits, temperatures, top_ks, top_ps, min_ps, shapes, totals, only, uniforms, tokens, probs,
    counters,
):  # fmt: skip
    """Filter each row of logits [M, V], and draw a token from it or write its probabilities.

    Always written, each row's distribution: shapes [M, 4] float32, the largest logit, the rate of
    `odds`, the cut of logits, the floor of odds; totals [M] int64, the sum of its weights, 0 where
    the row is no distribution; only [M] int64, the one column that it holds, -1 for many.
    Written unless it has no rows: tokens [M], drawn by uniforms [M]; probs [M, V], NaN in bad rows.
    Rows are shared by whoever takes part; `counters` as `team` has them.
    """
    work = _workspace(logits.shape[1])
    size, mine = logits.shape[1], 0
    row = take(counters, 0)
    while row < len(totals):
        _shape(
            logits, row, temperatures[row], top_ks[row], top_ps[row], min_ps[row], work,
            shapes, totals, only,
        )  # fmt: skip
        total, floor = totals[row], shapes[row, 3]
        if len(tokens):
            tokens[row] = only[row] if only[row] >= 0 else _pick(uniforms[row], floor, total, work)
        if len(probs):
            if only[row] < 0:
                _spread(probs, row, floor, total, work)
            else:
                _fill(probs, row, 0, size, np.float32(0 if total else np.nan))
                if total:
                    probs[row, only[row]] = 1
        mine += 1
        row = take(counters, 0)
    finish(counters, 0, mine, len(totals))


@compiled(fast=False)
def find_largest(logits, tokens, bad, counters):
    """Find each row's largest logit, the first of equals: tokens [M] int64, for logits [M, V].

    bad [M] bool: rows with NaN or +inf anywhere, or nothing above -inf; their token is 0.
    """
    work = _workspace(logits.shape[1])
    mine = 0
    row = take(counters, 0)
    while row < len(tokens):
        top = _find_top(logits, row, work)
        bad[row] = not (NEG_INF < top < INF)
        tokens[row] = 0 if bad[row] else _first_of(logits, row, top, work[1])
        mine += 1
        row = take(counters, 0)
    finish(counters, 0, mine, len(tokens))


@compiled(fast=False)
def find_bad(bits, bad, counters):
    """Find rows that are no distribution: NaN or +inf anywhere, or nothing above -inf.

    bits [M, V] uint32, those of float32 logits; bad [M] bool, written.
    """
    mine, minus_infinity, infinity = 0, np.uint32(0xFF800000), np.uint32(0x7F800000)
    row = take(counters, 0)
    while row < len(bad):
        special, alive = False, False
        for column in range(bits.shape[1]):
            value = bits[row, column]
            above = value != minus_infinity
            alive |= above
            special |= above & ((value & np.uint32(0x7FFFFFFF)) >= infinity)
        bad[row] = special | (not alive)
        mine += 1
        row = take(counters, 0)
    finish(counters, 0, mine, len(bad))


@compiled(fast=False)
def weigh(logits, temperatures, top_ks, top_ps, min_ps, shapes, totals, only, weights):
    """Write what `draw` draws from as whole numbers [M, V] int64, 0 all over a bad row."""
    size = logits.shape[1]
    work = _workspace(size)
    sums, odds = work[2], work[3]
    for row in range(len(totals)):
        _shape(
            logits, row, temperatures[row], top_ks[row], top_ps[row], min_ps[row], work,
            shapes, totals, only,
        )  # fmt: skip
        _fill(weights, row, 0, size, 0)
        if only[row] >= 0:
            weights[row, only[row]] = totals[row]
            continue
        for column in range(size):
            if sums[column // GROUP] > 0 and odds[column] >= shapes[row, 3]:
                weights[row, column] = np.int64(odds[column] * np.float32(UNIT))
