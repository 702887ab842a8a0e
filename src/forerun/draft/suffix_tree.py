"""How often each short run of tokens occurred in some texts, and what followed it.

A run that occurred once has no node of its own: all that can be said of it stands in the text. So
a token adds about one node, however long the runs are that are told apart.

    [7, 8, 9, 7, 8]   the runs [7], [8] and [7, 8] occurred twice and are nodes (the empty run is
                      node 0); [9], [7, 8, 9], ... occurred once: each is a place in the text
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["DEPTH", "Followers", "SuffixTree"]

DEPTH = 7  # longest run whose followers are told apart
TOKEN_BITS = 32  # of a key: a node above, a token below


class Followers(NamedTuple):
    """What came after a run."""

    token: int  # the most frequent, of several the latest
    times: int  # how often that one came
    total: int  # how often anything did


class SuffixTree:
    """Runs of up to `depth` tokens in a text that grows, or in several texts one after the other.

    The *state* of a run is, from 0 on, its node; below, ~place, where `place` is that of the token
    after the run's only occurrence.
    """

    def __init__(self, depth: int = DEPTH) -> None:
        self.depth = depth
        self._text: list[int | None] = []  # None: a text ends
        self._first = 0  # the place of the first token of `_text`
        self._children: dict[int, int] = {}  # (node, next token) -> state
        self._counts = [0]  # of each node's run
        self._totals = [0]  # how often something came after it
        self._best_tokens = [0]  # its most frequent follower, of several the latest
        self._best_counts = [0]  # 0: nothing came after it
        self._newest = [0]  # runs that the text ends in and that occurred before, by length

    @property
    def num_nodes(self) -> int:
        """Runs that are kept account of: nodes and single occurrences."""
        return 1 + len(self._children)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the newest text."""
        children, counts, totals = self._children, self._counts, self._totals
        place, newest, longest = self._first + len(self._text), self._newest, self.depth + 1
        self._text.extend(tokens)
        for token in tokens:
            place += 1
            known = [0]
            for node in newest:
                key = node << TOKEN_BITS | token
                child = children.get(key)
                if child is None:
                    children[key] = ~place
                    count = 1
                else:
                    if child < 0:
                        child = self._branch(key, ~child, is_last=len(known) == longest)
                    counts[child] = count = counts[child] + 1
                    known.append(child)
                totals[node] += 1
                self._count_up(node, token, count)
            del known[longest:]
            newest = known
        self._newest = newest

    def end_text(self) -> None:
        """Begin another text with the next token."""
        self._text.append(None)
        self._newest = [0]

    def followers(self, run: Sequence[int]) -> Followers | None:
        """Say what came after a run of up to `depth` tokens; None: nothing ever did."""
        state = self._find(run)
        if state is None:
            return None
        if state < 0:
            token = self._at(~state)
            return None if token is None else Followers(token, 1, 1)
        if not self._best_counts[state]:  # it is known from the end of a text alone
            return None
        return Followers(self._best_tokens[state], self._best_counts[state], self._totals[state])

    def count(self, run: Sequence[int], token: int) -> int:
        """Count how often `token` came after a run of up to `depth` tokens."""
        state = self._find(run)
        if state is None:
            return 0
        if state < 0:
            return int(self._at(~state) == token)
        child = self._children.get(state << TOKEN_BITS | token)
        return 0 if child is None else 1 if child < 0 else self._counts[child]

    def _find(self, run: Sequence[int]) -> int | None:
        """Find the state of a run; None: it did not occur."""
        children, state = self._children, 0
        for index, token in enumerate(run, 1):
            child = children.get(state << TOKEN_BITS | token)
            if child is None:
                return None
            if child < 0:  # the rest of it stands in the text, or nowhere
                rest = len(run) - index
                begin = ~child - self._first
                stands = self._text[begin : begin + rest] == list(run[index:])
                return child - rest if stands else None  # ~(place + rest)
            state = child
        return state

    def _at(self, place: int) -> int | None:
        """Read a place; behind the text there is nothing yet."""
        index = place - self._first
        return self._text[index] if index < len(self._text) else None

    def _branch(self, key: int, place: int, *, is_last: bool) -> int:
        """Make a node of a run that occurred once, as it occurs again."""
        self._children[key] = node = self._new_node()
        self._counts[node] = 1
        token = None if is_last else self._at(place)
        if token is not None:
            self._children[node << TOKEN_BITS | token] = ~(place + 1)
            self._totals[node] = 1
            self._count_up(node, token, 1)
        return node

    def _new_node(self) -> int:
        for column in (self._counts, self._totals, self._best_tokens, self._best_counts):
            column.append(0)
        return len(self._counts) - 1

    def _count_up(self, node: int, token: int, count: int) -> None:
        """Note that `token` came after a node's run, for the time number `count`."""
        if count >= self._best_counts[node]:
            self._best_tokens[node], self._best_counts[node] = token, count
