"""What to expect of a drafter that runs a network, before it is asked: tokens, rows, and its turns.

Counted by depth over all traffic: of the times that its guess held up to a depth, how often the
next token held as well. A guess that ended there counts as one that did not hold, so the chances
add up to the tokens that asking brings. A request counts without regard to depth, so that a few
guesses tell whether it is one where the drafter does better or worse than elsewhere.

Where it is not worth asking it is asked all the same now and then, lest what is known of it grow
old: in turns ever further apart as long as they come for nothing. They may cost no more than a
small part of the request's passes; the more turns come for nothing, the smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from ..types import DraftRequest
from .candid import Guess
from .tallies import Tallies
from .worth import best_count, worth

__all__ = ["Outlook", "Prospect"]

HOLDS = 0.75  # how likely a token is thought to hold before anything is known: worth a try
TRAFFIC_WEIGHT = 10.0  # tries that this is worth
REQUEST_WEIGHT = 4.0  # tries of a request that the traffic's rate is worth
MOST_TRIES = 32.0  # that a request remembers: then all of them count half
DEEPEST = 16  # deeper tokens are counted as this one
SPREAD_WEIGHT = 0.1  # of a new guess's rows for each depth

FIRST_GAP = 4  # steps without a question until one is asked out of turn; then twice as many, ..
MOST_GAP = 256
HEAD_START = 20  # passes that a request is thought to be older, so that its first turn comes early
TURN_COST = 0.02  # of a request's passes, as long as turns have something to tell
LEAST_TURN_COST = 0.0025  # of all passes
MOST_TURNS = 64.0  # that are remembered: then all of them count half

EVERY = "every depth"


@dataclass(slots=True)
class Prospect:
    """What a drafter is worth to one request."""

    counts: Tallies = field(default_factory=lambda: Tallies(MOST_TRIES))
    num_steps: int = 0
    num_idle: int = 0  # steps since it was asked
    gap: int = FIRST_GAP
    spent: float = 0.0  # on turns, in passes over one row
    awaits: bool = False  # a turn, of which nobody knows yet whether it told anything


class Outlook:
    """One drafter's prospects."""

    def __init__(self) -> None:
        self._counts = Tallies()  # of all traffic, by depth
        self._spread = 1.0  # rows of a guess for each depth: 1 for a path
        self._num_turns = 0.0
        self._num_told = 0.0  # turns after which it was worth asking
        self._num_steps = 0
        self._spent = 0.0

    def chances(self, count: int, prospect: Prospect) -> list[float]:
        """Estimate how likely each token of its guess holds, with all before it."""
        mean = self._counts.rate(EVERY, HOLDS, TRAFFIC_WEIGHT)
        own = prospect.counts.rate(EVERY, mean, REQUEST_WEIGHT)
        factor = _odds(own) / _odds(mean)
        rates = (
            _chance(_odds(self._counts.rate(min(depth, DEEPEST), HOLDS, TRAFFIC_WEIGHT)) * factor)
            for depth in range(1, count + 1)
        )
        return list(accumulate(rates, mul))

    def worth(
        self, request: DraftRequest, prospect: Prospect, share: float, cost: float, *, whole: bool
    ) -> float:
        """Rate a step in which it is asked; `whole`: all that it may draft will be taken."""
        holds = self.chances(request.max_draft, prospect)
        if whole:
            return worth(sum(holds), cost + request.row_cost * request.max_draft, share)
        return best_count(holds, request.row_cost * self._spread, share, cost)[1]

    def is_due(self, prospect: Prospect, cost: float) -> bool:
        """Say, in a step that would not ask it, whether it has a turn, which costs so many passes.

        (Rows are drafted only as far as they are worth it, so they are not counted.)
        """
        allowed = TURN_COST * (self._num_told + 2) / (self._num_turns + 2)
        return prospect.num_idle >= prospect.gap and (
            prospect.spent + cost <= allowed * (prospect.num_steps + HEAD_START)
            or self._spent + cost <= LEAST_TURN_COST * self._num_steps
        )

    def note_step(self, prospect: Prospect) -> None:
        """Note that a request takes a step."""
        prospect.num_steps += 1
        prospect.num_idle += 1
        self._num_steps += 1

    def note_turn(self, prospect: Prospect, cost: float) -> None:
        """Note that it is asked out of turn."""
        prospect.num_idle = 0
        prospect.gap = min(2 * prospect.gap, MOST_GAP)
        prospect.counts.fade()  # it is old
        prospect.spent += cost
        prospect.awaits = True
        self._spent += cost
        self._num_turns += 1
        if self._num_turns > MOST_TURNS:
            self._num_turns /= 2
            self._num_told /= 2

    def note_worth(self, prospect: Prospect) -> None:
        """Note that it is asked because that is worth it."""
        self._num_told += prospect.awaits
        prospect.num_idle, prospect.gap, prospect.awaits = 0, FIRST_GAP, False

    def note_guess(self, guess: Guess) -> None:
        """Note how many rows its guess has."""
        if guess.tokens:
            spread = len(guess.tokens) / guess.depth
            self._spread += SPREAD_WEIGHT * (spread - self._spread)

    def score(self, guess: Guess, limit: int, text: Sequence[int], prospect: Prospect) -> None:
        """Count how far a guess of at most `limit` tokens was right."""
        held = guess.count_held(text)
        if held and prospect.awaits:
            prospect.gap = max(prospect.gap // 4, FIRST_GAP)
        for depth in range(1, held + 1):
            self._count(depth, True, prospect)
        # Where the text ended, or the limit, nobody knows.
        if held < len(text) and (held < guess.depth or len(guess.tokens) < limit):
            self._count(held + 1, False, prospect)

    def _count(self, depth: int, held: bool, prospect: Prospect) -> None:
        self._counts.add(min(depth, DEEPEST), held)
        self._counts.add(EVERY, held)
        prospect.counts.add(EVERY, held)


def _odds(chance: float) -> float:
    return chance / (1 - chance)


def _chance(odds: float) -> float:
    return odds / (1 + odds)
