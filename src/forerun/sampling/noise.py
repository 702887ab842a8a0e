"""The randomness of sampling, as a pure function of what is being decided.

A uniform is a hash of (request seed, absolute position, stream). Nothing is consumed, so it
depends neither on the batch nor on how many tokens a step verified: the token at position 17 of a
request is drawn with the same noise whether it was decoded alone, among strangers or behind sixteen
drafts. Draft, accept and recovery noise must be independent (vLLM PR #54282), hence the streams.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Stream", "derive_seed", "uniforms"]

# Odd constants with no pattern in their bits: adding multiples of one visits all 2^64 states.
GOLDEN = 0x9E3779B97F4A7C15
SILVER = 0xD1342543DE82EF95
BRONZE = 0xA24BAED4963EE407
MASK = (1 << 64) - 1


class Stream(IntEnum):
    """What a uniform decides. The numbers are part of every seeded result: never change them.

    RECOVER is keyed by the position at which a step begins, the only one known before its outcome
    and never met twice; the others by the position of the token that they decide.
    """

    TARGET = 0  # the target's own sample at a position
    ACCEPT = 1  # whether a sampled draft token at a position survives
    RECOVER = 2  # the token after the accepted ones, when drafts were sampled
    DRAFT = 3  # the draft's sample at a position


def uniforms(
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    stream: Stream,
    origins: NDArray[np.int64] | None = None,
) -> Tensor:
    """Hash seeds and positions, arrays of one shape, to float64 uniforms in [0, 1) of that shape.

    `origins` is the position at which the request's step began. Block verification looks at the
    noise of positions that it then rejects, so the next step, which decides those positions again,
    must not see that noise twice: pass origins for its ACCEPT and DRAFT streams. The token rule and
    the point-mass rule look at nothing past the first rejection and do not need it.
    """
    assert seeds.dtype == np.uint64, "seeds are uint64"
    assert seeds.shape == positions.shape, "one seed for each position"
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is the point
        state = _mix(seeds + np.uint64(GOLDEN))
        state = _mix(state + _steps(positions, GOLDEN))
        state = _mix(state + np.uint64((int(stream) + 1) * SILVER & MASK))
        if origins is not None:
            state = _mix(state + _steps(origins, BRONZE))
    # the upper 53 bits, the most that a float64 below 1 can hold evenly spaced
    fractions = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy(np.ascontiguousarray(fractions))


def derive_seed(seed: int, index: int) -> int:
    """Give each of a prompt's samples its own 64-bit seed; sample 0 keeps the request's."""
    if index == 0:
        return seed
    with np.errstate(over="ignore"):
        start = np.array([seed], np.uint64) + np.uint64(BRONZE)
        return int(_mix(_mix(start) + _steps(np.array([index]), SILVER))[0])


def _steps(positions: NDArray[np.int64], stride: int) -> NDArray[np.uint64]:
    return (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(stride)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64 bits one to one (the finaliser of splitmix64, Stafford's variant 13)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
