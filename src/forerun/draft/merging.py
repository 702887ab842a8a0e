"""The guesses of several drafters for one request in one tree: what they agree on is there once.

    ngram   a b c d        a b c d     backed by both as far as c, then by one each
    suffix  a b c x   ->        x

Each token has a *kind*: who backs it, and how likely they say it is, roughly. How often a kind came
true says how likely the token is (`tallies`): two drafters that agree are right more often than one
that is alone. Once the text is known every guess is scored, whether it was used or not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .candid import Guess
from .tallies import Record
from .worth import best_count, least_chance, worth

__all__ = ["Choice", "GuessTree"]

STEP = 0.5  # of the log odds: tokens whose sureness differs by less are of one kind
SILENT = (0.6, 0.15, 0.08, 0.05)  # chance of a drafter's best, second, .. token if it names none
UNSURE, SURE = 0.01, 0.99  # nobody is surer than this
ALONE = 0.6  # of the log odds: what is named by some of those who name chances is less likely


@dataclass(frozen=True, slots=True)
class Choice:
    """The part of a tree that is drafted."""

    tokens: list[int]
    parents: list[int]
    worth: float  # tokens a pass, see `worth`
    backer: int | None  # who backs most of it, the first of equals; None: it is empty

    @property
    def is_path(self) -> bool:
        return self.parents == list(range(len(self.parents)))

    def first_path(self) -> list[int]:
        """Keep of a tree the path that is likeliest: first children all the way."""
        path: list[int] = []
        for node, parent in enumerate(self.parents, 1):
            if parent == (path[-1] if path else 0):
                path.append(node)
        return [self.tokens[node - 1] for node in path]


class GuessTree:
    """Nodes count from 1; 0 is the committed tokens. Drafters are numbers from 0."""

    __slots__ = (
        "_backers", "_depths", "_holds", "_kinds", "_named", "_nodes", "_num_candid", "_odds",
        "_parents", "_ranks", "_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        self._tokens = [-1]
        self._parents = [0]
        self._depths = [0]
        self._ranks = [0]  # among the children that the first to name it named, best first
        self._backers = [-1]  # a bit for each drafter; all of them stand behind the text
        self._odds = [0.0]  # sum of the log odds that backers name
        self._named = [0]  # how many of them name any
        self._num_candid = 0  # drafters that name chances
        self._kinds: list[Hashable] = []  # of each node, once weighed; None: not looked at
        self._holds: list[float] = []  # how likely each node and all above it hold

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, drafter: int, guess: Guess) -> None:
        """Put a guess in."""
        bit, chances, nodes = 1 << drafter, guess.chances, self._nodes
        place = [0]  # the node of each of the guess's own
        self._num_candid += chances is not None
        for index, token in enumerate(guess.tokens):
            parent = index if guess.parents is None else guess.parents[index]
            above = place[parent]
            node = nodes.get((above, token))
            if node is None:
                rank = 0 if guess.parents is None else guess.parents[:index].count(parent)
                node = self._append(token, above, rank)
            self._backers[node] |= bit
            if chances is not None:
                chance = chances[index]
                chance = UNSURE if chance < UNSURE else SURE if chance > SURE else chance
                self._odds[node] += math.log(chance / (1 - chance))
                self._named[node] += 1
            place.append(node)

    def weigh(self, record: Record, least: float = 0.0) -> None:
        """Estimate how likely each node is to hold; below `least` what follows is not looked at."""
        kinds: list[Hashable] = [None]
        holds = [1.0]
        for node in range(1, len(self._tokens)):
            above = holds[self._parents[node]]
            if above < least:
                kinds.append(None)
                holds.append(0.0)
                continue
            num_named = self._named[node]
            kind: Hashable
            if num_named:
                odds = self._odds[node] / num_named
                kind = self._backers[node], round(odds / STEP)
                own = _chance(odds if num_named == self._num_candid else odds - ALONE)
            else:
                rank = min(self._ranks[node], len(SILENT) - 1)
                kind, own = (self._backers[node], self._depths[node], rank), SILENT[rank]
            kinds.append(kind)
            holds.append(above * record.rate(kind, own))
        self._kinds, self._holds = kinds, holds

    def choose(
        self, most: int, row_cost: float, *, share: float, paid: float, branching: bool
    ) -> Choice:
        """Choose what is worth most, after `weigh`: at most so many tokens; one path, or a tree."""
        least = least_chance(row_cost, share)
        order = [node for node, chance in enumerate(self._holds) if node and chance >= least]
        if branching:
            # Nobody holds more surely than what it follows, nor comes before it.
            order.sort(key=self._holds.__getitem__, reverse=True)  # equals keep their order
            order = order[:most]
            count, value = best_count([self._holds[n] for n in order], row_cost, share, paid)
            nodes = order[:count]
        else:
            nodes, value = self._best_path(order, most, row_cost, share, paid)
        number = {0: 0} | {node: index for index, node in enumerate(nodes, 1)}
        return Choice(
            [self._tokens[node] for node in nodes],
            [number[self._parents[node]] for node in nodes],
            value,
            self._main_backer(nodes),
        )

    def score(self, text: Sequence[int], record: Record) -> None:
        """Count what came true of the nodes that the text put to the test, after `weigh`."""
        reached = {0: 0}  # nodes that came true -> tokens of the text up to there
        for node in range(1, len(self._tokens)):
            place = reached.get(self._parents[node])
            if place is not None and place < len(text):
                held = self._tokens[node] == text[place]
                if self._kinds[node] is not None:
                    record.add(self._kinds[node], held)
                if held:
                    reached[node] = place + 1

    def _append(self, token: int, parent: int, rank: int) -> int:
        node = self._nodes[parent, token] = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        self._ranks.append(rank)
        self._backers.append(0)
        self._odds.append(0.0)
        self._named.append(0)
        return node

    def _best_path(
        self, nodes: Sequence[int], most: int, row_cost: float, share: float, paid: float
    ) -> tuple[list[int], float]:
        best, value = 0, worth(0, paid, share)
        gains = {0: 0.0}
        for node in nodes:
            depth, above = self._depths[node], gains.get(self._parents[node])
            if above is None or depth > most:
                continue
            gains[node] = above + self._holds[node]
            own = worth(gains[node], paid + row_cost * depth, share)
            if own > value:
                best, value = node, own
        path = []
        while best:
            path.append(best)
            best = self._parents[best]
        return path[::-1], value

    def _main_backer(self, nodes: Sequence[int]) -> int | None:
        counts: dict[int, int] = {}
        for node in nodes:
            bits = self._backers[node]
            for drafter in range(bits.bit_length()):
                if bits >> drafter & 1:
                    counts[drafter] = counts.get(drafter, 0) + 1
        if not counts:
            return None
        return max(sorted(counts), key=counts.__getitem__)


def _chance(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))
