"""How often guesses of a kind came true: counts of a request, beside those of all traffic.

    traffic   held / tried of each kind, the older the less; until there are any, a guess's own idea
    request   the same of one request; until there are many, the traffic's rate

Pure counts: what a kind is, is the caller's affair.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

__all__ = ["Record", "Tallies"]

GUESS_WEIGHT = 10.0  # tries that a guess's own idea of itself is worth
TRAFFIC_WEIGHT = 12.0  # tries that the traffic's rate is worth to a request
MOST_TRIES = 400.0  # of a kind that the traffic remembers: then all of them count half


class Tallies:
    """Times held and times tried, by kind."""

    def __init__(self, most: float = MOST_TRIES) -> None:
        self._most = most
        self._counts: dict[Hashable, list[float]] = {}  # [held, tried]

    def add(self, kind: Hashable, held: bool) -> None:
        """Count one try."""
        counts = self._counts.get(kind)
        if counts is None:
            counts = self._counts[kind] = [0.0, 0.0]
        counts[0] += held
        counts[1] += 1
        if counts[1] > self._most:
            counts[0] /= 2
            counts[1] /= 2

    def fade(self) -> None:
        """Have all that was counted count half."""
        for counts in self._counts.values():
            counts[0] /= 2
            counts[1] /= 2

    def rate(self, kind: Hashable, prior: float, weight: float) -> float:
        """Estimate how often a kind holds; `prior` counts as much as `weight` tries."""
        counts = self._counts.get(kind)
        if counts is None:
            return prior
        return (counts[0] + weight * prior) / (counts[1] + weight)


class Record:
    """What one request's guesses were worth, and what everybody's were where it has few."""

    def __init__(self, traffic: Tallies) -> None:
        self._traffic = traffic
        self._own = Tallies(most=math.inf)

    def add(self, kind: Hashable, held: bool) -> None:
        """Count one try, for the request and for the traffic."""
        self._own.add(kind, held)
        self._traffic.add(kind, held)

    def rate(self, kind: Hashable, guessed: float) -> float:
        """Estimate how likely a guess of this kind is to hold; `guessed` is its own idea."""
        prior = self._traffic.rate(kind, guessed, GUESS_WEIGHT)
        return self._own.rate(kind, prior, TRAFFIC_WEIGHT)
