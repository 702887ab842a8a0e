"""What acceptance rules ask of the target, from logits: single probabilities, and residuals.

Follows `draw`, whose shapes, totals and `only` say what each row's distribution is; probabilities
have the same bits as those that `draw` writes. Letters: p target, q draft.
"""

from __future__ import annotations

import numpy as np

from .compiling import compiled
from .draw import lowest_power
from .odds import GROUP, excess_group, odds_group, peak_group, portion_group, probs_group, top_group
from .team import finish, take

__all__ = ["chances", "excess", "recover"]

UNIT = 2.0**42


@compiled(fast=False)
def _group_probs(logits, row, at, shapes, totals, odds, probs, place):
    """Write the probabilities of 64 columns from `at` on, those past the end as 0.

    Returns the sum of their weights; nothing is written if it is 0. For rows of many columns.
    """
    size = logits.shape[1]
    top, rate, cut, floor = shapes[row, 0], shapes[row, 1], shapes[row, 2], shapes[row, 3]
    if at + GROUP <= size:
        if floor > 0 or cut > -np.inf:  # then most groups hold nothing, as their maximum may tell
            best = top_group(logits, row * size + at)
            if best < cut or (best - top) * rate < lowest_power(floor):
                return np.int64(0)
        weight = odds_group(logits, row * size + at, top, rate, cut, floor, odds, place)
    else:
        for i in range(GROUP):
            probs[place + i] = logits[row, at + i] if at + i < size else -np.inf
        weight = odds_group(probs, place, top, rate, cut, floor, odds, place)
    if weight > 0:
        probs_group(odds, place, floor, 1.0 / np.float64(totals[row]), probs, place)
    return weight


@compiled(fast=False)
def chances(logits, shapes, totals, only, rows, columns, probs):
    """Write p of single columns: rows, columns, probs [n]. NaN where a row is no distribution."""
    odds, group = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    for i in range(len(rows)):
        row, column = rows[i], columns[i]
        if totals[row] == 0:
            probs[i] = np.nan
        elif only[row] >= 0:
            probs[i] = 1 if only[row] == column else 0
        else:
            at = column // GROUP * GROUP
            weight = _group_probs(logits, row, at, shapes, totals, odds, group, np.int64(0))
            probs[i] = group[column - at] if weight > 0 else 0


@compiled(fast=False)
def _workspace(size):
    """Make what one row at a time needs: odds, p and residual of a row, sums, a group of q."""
    groups = -(-size // GROUP)
    odds, probs = np.empty(groups * GROUP, np.float32), np.empty(groups * GROUP, np.float32)
    more, sums = np.empty(groups * GROUP, np.float64), np.empty(groups, np.int64)
    return odds, probs, more, sums, np.empty(GROUP, np.float32)


@compiled(fast=False)
def _fill_probs(logits, row, shapes, totals, only, work):
    """Fill in a row's p and which groups have any: the others' sums are 0, their p not written."""
    odds, probs, sums = work[0], work[1], work[3]
    for g in range(len(sums)):
        at = g * GROUP
        if only[row] < 0:
            sums[g] = _group_probs(logits, row, at, shapes, totals, odds, probs, at)
        else:
            sums[g] = 1 if at <= only[row] < at + GROUP else 0
            if sums[g] > 0:
                for i in range(GROUP):
                    probs[at + i] = 1 if at + i == only[row] else 0


@compiled(fast=False)
def _fill_excess(drafts, draft, size, share, work):
    """Fill in max(0, share * p - q) where p has any, and return the sum of its weights.

    `draft` is the row of `drafts` that holds q; -1: q is 0.
    """
    _, probs, more, sums, ending = work
    mass = 0.0
    for g in range(len(sums)):
        at = g * GROUP
        if sums[g] == 0:
            continue
        if draft >= 0 and at + GROUP <= size:
            mass += excess_group(probs, at, drafts, draft * size + at, share, more, at)
        else:
            for i in range(GROUP):
                ending[i] = drafts[draft, at + i] if draft >= 0 and at + i < size else 0
            mass += excess_group(probs, at, ending, 0, share, more, at)
    return mass


@compiled(fast=False)
def excess(logits, shapes, totals, only, rows, drafts, places, shares, masses, counters):
    """Write Z = sum(max(0, share * p - q)), each column rounded down to 2^-42.

    For rows [n] of the target, places [n] the rows of `drafts` that hold q, shares [n] float64.
    Shared by whoever takes part; `counters` as `team` has them.
    """
    size, mine = logits.shape[1], 0
    work = _workspace(size)
    i = take(counters, 0)
    while i < len(rows):
        masses[i] = 0
        if totals[rows[i]] > 0:
            _fill_probs(logits, rows[i], shapes, totals, only, work)
            masses[i] = _fill_excess(drafts, places[i], size, shares[i], work) / UNIT
        mine += 1
        i = take(counters, 0)
    finish(counters, 0, mine, len(rows))


@compiled(fast=False)
def _largest(work):
    """Find the largest residual."""
    more, sums = work[2], work[3]
    best = 0.0
    for g in range(len(sums)):
        if sums[g] > 0:
            best = max(best, peak_group(more, g * GROUP))
    return best


@compiled(fast=False)
def _draw_residual(uniform, top, work):
    """Draw a column with a chance in proportion to its residual, as `sample_from_probs` does."""
    more, sums = work[2], work[3]
    total = np.int64(0)
    for g in range(len(sums)):
        if sums[g] > 0:
            sums[g] = portion_group(more, g * GROUP, top)
            total += sums[g]
    point = min(np.int64(uniform * np.float64(total)), total - 1)
    g = 0
    while sums[g] <= point:
        point -= sums[g]
        g += 1
    column = g * GROUP
    while True:
        weight = np.int64(more[column] / top * UNIT)
        if weight > point:
            return column
        point -= weight
        column += 1


@compiled(fast=False)
def recover(logits, shapes, totals, only, rows, drafts, places, shares, uniforms, tokens, counters):
    """Draw tokens [n] from norm(max(0, share * p - q)) by uniforms [n]; from p if that is nothing.

    For rows [n] of the target, places [n] the rows of `drafts` that hold q; -1: q is 0, share 1.
    Shared by whoever takes part; `counters` as `team` has them.
    """
    size, mine = logits.shape[1], 0
    work = _workspace(size)
    i = take(counters, 0)
    while i < len(rows):
        tokens[i] = 0
        if totals[rows[i]] > 0:
            _fill_probs(logits, rows[i], shapes, totals, only, work)
            _fill_excess(drafts, places[i], size, shares[i], work)
            top = _largest(work)
            if top == 0:  # p = q up to rounding: p itself is as good a residual
                _fill_excess(drafts, np.int64(-1), size, 1.0, work)
                top = _largest(work)
            tokens[i] = _draw_residual(uniforms[i], top, work)
        mine += 1
        i = take(counters, 0)
    finish(counters, 0, mine, len(rows))
