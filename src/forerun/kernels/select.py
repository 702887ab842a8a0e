"""The crossing of a list: the largest number down to which enough of the list is gathered.

This is what both cuts ask for. Top-k gathers numbers until there are k, top-p gathers weight until
there is enough; equal numbers are gathered together. Found by halving the range of numbers in which
the crossing can lie and dropping what lies outside, without a sort.
"""

from __future__ import annotations

import numpy as np

from .compiling import compiled
from .odds import GROUP, collect_group, count_group, from_key, sum_group, to_key

__all__ = ["COUNTS", "WEIGHS", "crossing"]

ROUNDS = 3  # halvings between two droppings: dropping costs about as much as two halvings
COUNTS, WEIGHS = np.float32(0), np.float32(1)  # floats: each whole number would be compiled anew
NOWHERE = np.float32(-np.inf)


@compiled(fast=False)
def crossing(values, count, low, high, measure, needed):
    """Find the largest c in values[:count] with sum(m(v) for v >= c) >= needed.

    m(v) is 1 if `measure` is COUNTS, floor(v * 2^42) if it is WEIGHS. All values lie in
    [low, high], together they are enough, and none is NaN. The list is overwritten, up to the end
    of its last group of 64.
    """
    lower, upper = np.int64(to_key(low)), np.int64(to_key(high))
    gathered = np.int64(0)  # by the values above all that are left in the list
    beyond = np.int64(0)  # by the values above `upper`
    step = 0
    while lower < upper:
        if step % ROUNDS == 0:
            if step > 0:
                gathered, count = beyond, _keep(values, count, lower, upper)
            for i in range(count, -(-count // GROUP) * GROUP):
                values[i] = NOWHERE
        step += 1
        middle = upper - (upper - lower) // 2
        reached = gathered + _gather(values, count, from_key(np.int32(middle)), measure)
        if np.float64(reached) >= needed:
            lower = middle
        else:
            upper, beyond = middle - 1, reached
            if upper == -1:  # the key of -0.0, which `reached` holds: it equals 0.0
                upper = -2
    return from_key(np.int32(lower))


@compiled(fast=False)
def _gather(values, count, lowest, measure):
    """Sum m(v) over the values that are not below `lowest`."""
    total = np.int64(0)
    if measure == WEIGHS:
        for at in range(0, count, GROUP):
            total += sum_group(values, at, lowest)
    else:
        for at in range(0, count, GROUP):
            total += count_group(values, at, lowest)
    return total


@compiled(fast=False)
def _keep(values, count, lower, upper):
    """Move the values between two keys to the front and say how many they are."""
    low, high = from_key(np.int32(lower)), from_key(np.int32(upper))
    kept = np.int64(0)
    for at in range(0, count, GROUP):
        kept = collect_group(values, at, low, high, values, kept)
    return kept
