"""A suffix tree over several texts, the oldest of which can be taken out again without a trace.

Taking out is exact: what is left is what the other texts alone would have made, but for which of
several equally frequent followers is named first. Both ways cost up to `depth` nodes a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .suffix_tree import DEPTH, TOKEN_BITS, SuffixTree

__all__ = ["ForgettingTree"]

# Of one node: its followers by how often they came, those of a count in the order in which they
# reached it.
_Ranks = dict[int, dict[int, None]]


class ForgettingTree(SuffixTree):
    """Texts come in at one end and go out at the other."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__(depth)
        self._lengths: deque[int] = deque()  # of the texts, oldest first
        self._oldest = 0  # the place of the first token that is kept
        self._free: list[int] = []  # nodes to use again
        # Of nodes with two and more followers: which is the most frequent once the first goes.
        self._ranks: dict[int, _Ranks] = {}

    @property
    def num_texts(self) -> int:
        return len(self._lengths)

    def add(self, text: Sequence[int]) -> None:
        """Take in a whole text."""
        self.extend(text)
        self.end_text()
        self._lengths.append(len(text))

    def forget(self) -> int:
        """Take out the oldest text; say how many tokens it had."""
        length = self._lengths.popleft()
        index = self._oldest - self._first
        text = [token for token in self._text[index : index + length] if token is not None]
        for start in range(length):
            self._forget_runs(text[start : start + self.depth + 1])
        self._oldest += length + 1  # and the mark of its end
        dead = self._oldest - self._first
        if dead > len(self._text) // 2:  # now and then, so that a token is moved once or so
            del self._text[:dead]
            self._first = self._oldest
        return length

    def _forget_runs(self, tokens: Sequence[int]) -> None:
        """Take out one occurrence of each run that `tokens` begin with."""
        children, counts, totals = self._children, self._counts, self._totals
        path, node = [], 0
        for token in tokens:
            key = node << TOKEN_BITS | token
            child = children[key]
            path.append((node, token, key, child))
            if child < 0:  # its only occurrence, so this one
                break
            node = child
        for parent, token, key, child in reversed(path):
            count = 0
            if child >= 0:
                counts[child] = count = counts[child] - 1
            if count == 0:
                del children[key]
                if child >= 0:
                    self._free.append(child)
            elif count == 1:
                self._unbranch(key, child)
            totals[parent] -= 1
            self._count_down(parent, token, count)

    def _unbranch(self, key: int, node: int) -> None:
        """Make a place in the text again of a node that has one occurrence left.

        Its one follower says where that is. Without a follower it stays a node.
        """
        if self._totals[node]:
            below = node << TOKEN_BITS | self._best_tokens[node]
            place = self._children[below]
            if place < 0:
                del self._children[below]
                self._children[key] = place + 1  # ~(place - 1)
                self._totals[node] = self._counts[node] = self._best_counts[node] = 0
                self._free.append(node)

    def _new_node(self) -> int:
        return self._free.pop() if self._free else super()._new_node()

    def _count_up(self, node: int, token: int, count: int) -> None:
        best = self._best_counts[node]
        ranks = self._ranks.get(node)
        if ranks is None and best and self._best_tokens[node] != token:
            ranks = self._ranks[node] = {best: {self._best_tokens[node]: None}}
        if ranks is not None:
            if count > 1:
                _take(ranks, count - 1, token)
            ranks.setdefault(count, {})[token] = None
        if count >= best:
            self._best_tokens[node], self._best_counts[node] = token, count

    def _count_down(self, node: int, token: int, count: int) -> None:
        """Note that `token` came after a node's run once less, so `count` times."""
        ranks = self._ranks.get(node)
        if ranks is None:  # its only follower
            self._best_counts[node] = count
            return
        _take(ranks, count + 1, token)
        if count:
            ranks.setdefault(count, {})[token] = None
        # The highest count fell by one at most.
        best = self._best_counts[node]
        best = best if best in ranks else best - 1
        self._best_tokens[node], self._best_counts[node] = next(reversed(ranks[best])), best
        if len(ranks) == 1 and len(ranks[best]) == 1:
            del self._ranks[node]


def _take(ranks: _Ranks, count: int, token: int) -> None:
    same = ranks[count]
    del same[token]
    if not same:
        del ranks[count]
