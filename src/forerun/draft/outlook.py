"""What to expect of a drafter that runs a network, before it is asked: tokens, rows, and its turns.

Counted by depth: of the times that its guess held up to a depth, how often the next token held as
well. A guess that ended there counts as one that did not hold, so the chances add up to the tokens
that asking brings.

Where it is not worth asking it is asked all the same once in a while. A turn that comes for nothing
makes the next one later, and turns may cost no more than `TURN_COST` of the passes between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from ..types import DraftRequest
from .candid import Guess
from .tallies import Record
from .worth import best_count, worth

__all__ = ["Outlook"]

HOLDS = 0.6  # how likely a token is thought to hold before anything is known
FIRST_GAP = 32  # steps without a question until one is asked out of turn
MOST_GAP = 1024
TURN_COST = 0.01  # of the passes between two turns
DEEPEST = 16  # deeper tokens are counted as this one
SPREAD_WEIGHT = 0.1  # of a new guess's rows for each depth


class Outlook:
    """One drafter's prospects, by its number."""

    def __init__(self, drafter: int) -> None:
        self._drafter = drafter
        self._spread = 1.0  # rows of a guess for each depth: 1 for a path
        self._num_idle = 0  # steps of requests since it was asked out of turn
        self._gap = FIRST_GAP

    def worth(
        self, request: DraftRequest, record: Record, share: float, cost: float, *, whole: bool
    ) -> float:
        """Rate a step in which it is asked; `whole`: all that it may draft will be taken."""
        depths = range(1, request.max_draft + 1)
        rates = (record.rate(self._kind(depth), HOLDS) for depth in depths)
        holds = list(accumulate(rates, mul))
        if whole:
            return worth(sum(holds), cost + request.row_cost * request.max_draft, share)
        return best_count(holds, request.row_cost * self._spread, share, cost)[1]

    def note(self, guess: Guess) -> None:
        """Note how many rows its guess has."""
        if guess.tokens:
            spread = len(guess.tokens) / guess.depth
            self._spread += SPREAD_WEIGHT * (spread - self._spread)

    def score(self, guess: Guess, limit: int, text: Sequence[int], record: Record) -> None:
        """Count how far a guess of at most `limit` tokens was right."""
        held = guess.count_held(text)
        for depth in range(1, held + 1):
            record.add(self._kind(depth), True)
        # Where the text ended, or the limit, nobody knows.
        ended = held == len(text) or (held == guess.depth and len(guess.tokens) == limit)
        if not ended:
            record.add(self._kind(held + 1), False)

    def is_due(self, num_idle: int, cost: float) -> bool:
        """Say whether it has a turn in a step that does not ask it about so many requests.

        `cost` is what a turn takes, in passes over one row: rows are drafted only if they are worth
        it.
        """
        self._num_idle += num_idle
        if self._num_idle < max(self._gap, cost / TURN_COST):
            return False
        self._num_idle, self._gap = 0, min(2 * self._gap, MOST_GAP)
        return True

    def note_worth(self) -> None:
        """Note that it was asked because it is worth it."""
        self._gap = FIRST_GAP

    def _kind(self, depth: int) -> tuple[str, int, int]:
        return "depth", self._drafter, min(depth, DEEPEST)
