"""What a draft is worth: the tokens that it may bring against the passes that it costs.

Pure arithmetic. Costs are in passes over one row; a chance is how likely a draft token is to be
kept, with all that it follows. A step in which the chances add up to g and the draft costs c brings
1 + g tokens for s + c passes; s is the request's part of a pass without drafts, 1 where it is
alone.

What is not guessed now is guessed in the next step in part, where text that is copied goes on being
copied: the tokens of a step do not come at the mean rate of plain decoding. So `AHEAD` further
tokens at `AHEAD_RATE` tokens a pass are reckoned with each step: that much better than plain a
draft must be (docs/notes.md).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["best_count", "expected_tokens", "least_chance", "share_of_pass", "worth"]

AHEAD = 1.0
AHEAD_RATE = 3.0


def share_of_pass(num_requests: int, row_cost: float) -> float:
    """Say what part of a pass without drafts each of its requests bears: 4, 0.1 -> 1.3 / 4."""
    return (1 + row_cost * (num_requests - 1)) / num_requests


def worth(gain: float, cost: float, share: float = 1.0) -> float:
    """Rate a step in tokens a pass: `gain` tokens are expected of a draft that costs `cost`."""
    return (1 + gain + AHEAD) / (share * (1 + AHEAD / AHEAD_RATE) + cost)


def least_chance(row_cost: float, share: float = 1.0) -> float:
    """Say how likely a token must be for its row to be worth anything, however good the rest."""
    return row_cost * worth(0, 0, share)


def best_count(
    chances: Sequence[float], row_cost: float, share: float = 1.0, paid: float = 0.0
) -> tuple[int, float]:
    """Say how many of the tokens, taken in this order, are worth most, and how much.

    `paid` is what the guess has cost, whether it is used or not. Of equals the shorter draft.
    """
    count, best, gain = 0, worth(0, paid, share), 0.0
    for index, chance in enumerate(chances, 1):
        gain += chance
        value = worth(gain, paid + row_cost * index, share)
        if value > best:
            count, best = index, value
    return count, best


def expected_tokens(chances: Sequence[float]) -> float:
    """Add up the tokens of a path, each kept with its chance if those before it are."""
    total, holds = 0.0, 1.0
    for chance in chances:
        holds *= chance
        total += holds
    return total
