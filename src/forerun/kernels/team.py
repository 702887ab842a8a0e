"""How threads share the parts of a pass without a dispatcher: take the next part, count it done.

A pass is a row of phases; every phase has a number of parts, and nobody may begin a phase before
all parts of the one before are done. Whoever is there takes parts until none is left, then waits
for those that others still hold. So one slow processor does not hold up a fixed share, and any
number of participants is enough, even one that comes when all is over.

    counters [phases, 16] int64, zero at first; column 0: parts taken, column 8: parts done.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .vector import pointer

__all__ = ["COUNTER_WIDTH", "finish", "new_counters", "take"]

COUNTER_WIDTH = 16  # 128 bytes: neighbours in memory are not passed between processors
_DONE = 8
# How often a waiting thread looks before it offers its processor to others: some ten microseconds.
_SPINS = 500

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


def new_counters(num_phases: int) -> np.ndarray[Any, Any]:
    """Make counters for a pass; each pass needs its own or zeroed ones."""
    return np.zeros((num_phases, COUNTER_WIDTH), np.int64)


@intrinsic
def _fetch_add(_context, counters, at, amount):
    """Add to a counter at once for all threads; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = pointer(context, builder, signature.args[0], args[0], args[1], ir.IntType(64))
        return builder.atomic_rmw("add", place, args[2], "acq_rel")

    return types.int64(counters, types.intp, types.int64), generate


@intrinsic
def _read(_context, counters, at):
    """Read a counter, and see all that was written before it was last raised."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = pointer(context, builder, signature.args[0], args[0], args[1], ir.IntType(64))
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(counters, types.intp), generate


@intrinsic
def _pause(_context):
    """Tell the processor that this is a waiting loop, where it has a word for that."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause")
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@njit(nogil=True)
def take(counters, phase):
    """Take the next part of a phase: its number, or one past the last if all are taken."""
    return _fetch_add(counters, phase * COUNTER_WIDTH, 1)


@njit(nogil=True)
def finish(counters, phase, mine, parts):
    """Count `mine` parts as done, and wait until all `parts` of the phase are."""
    at = phase * COUNTER_WIDTH + _DONE
    if mine:
        _fetch_add(counters, at, mine)
    spins = 0
    while _read(counters, at) < parts:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _sched_yield()
