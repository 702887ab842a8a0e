"""Draft trees: how one grows from a head's guesses, and which of its nodes are worth a row.

Pure data and arithmetic. A node's score is how likely its path holds as far as the head knows: the
product of the head's probabilities along it (EAGLE-2 2406.16858, section 4: they are calibrated).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["GrowingTree", "Node", "best_product", "static_tree"]


@dataclass(frozen=True, slots=True)
class Node:
    """A guessed token."""

    token: int
    parent: int  # the number of the node that it follows; 0: the committed tokens
    score: float  # natural logarithm of how likely the path holds
    depth: int  # from 1


@dataclass(slots=True)
class GrowingTree:
    """One request's tree while a head looks at one depth after the other. Nodes count from 1."""

    nodes: list[Node] = field(default_factory=list)
    frontier: list[int] = field(default_factory=list)  # nodes of the last depth

    def grow(self, parents: Sequence[int], guesses: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Put children below the nodes that a pass looked at: (token, log-probability) of each."""
        self.frontier = []
        for parent, children in zip(parents, guesses, strict=True):
            above = self.nodes[parent - 1] if parent else Node(-1, 0, 0.0, 0)
            for token, logprob in children:
                self.nodes.append(Node(token, parent, above.score + logprob, above.depth + 1))
                self.frontier.append(len(self.nodes))

    def best_of_frontier(self, count: int, least: float) -> list[int]:
        """Name the likeliest nodes of the last depth, none less likely than `least`."""
        floor = math.log(least)
        worth = [node for node in self.frontier if self.nodes[node - 1].score >= floor]
        return sorted(worth, key=lambda node: -self.nodes[node - 1].score)[:count]

    def path_to(self, node: int) -> list[int]:
        """List the nodes from the top to a node, itself last."""
        path = [node]
        while parent := self.nodes[path[-1] - 1].parent:
            path.append(parent)
        return path[::-1]

    def take(self, most: int, least: float) -> tuple[list[int], list[int]]:
        """Keep the `most` likeliest nodes: (tokens, parents), best first.

        A parent is at least as likely as its child and was there before it, so it stays before it.
        """
        floor = math.log(least)
        order = sorted(range(1, len(self.nodes) + 1), key=lambda n: -self.nodes[n - 1].score)
        order = [node for node in order if self.nodes[node - 1].score >= floor][:most]
        number = {0: 0} | {node: index for index, node in enumerate(order, 1)}
        kept = [self.nodes[node - 1] for node in order]
        return [node.token for node in kept], [number[node.parent] for node in kept]


def best_product(
    levels: Sequence[Sequence[tuple[int, float]]], most: int, least: float
) -> tuple[list[int], list[int]]:
    """Build the likeliest tree where each depth is guessed alone: (tokens, parents), best first.

    `levels` holds each depth's (token, log-probability), likeliest first: heads that do not know of
    each other. A node's children are the tokens of the next level; its score is the product.
    """
    floor = math.log(least)
    tokens: list[int] = []
    parents: list[int] = []
    # (-score, order of coming, depth, rank in its level, number of the parent)
    heap: list[tuple[float, int, int, int, int]] = []
    count = 0

    def offer(score: float, depth: int, rank: int, parent: int) -> None:
        nonlocal count
        if depth < len(levels) and rank < len(levels[depth]):
            total = score + levels[depth][rank][1]
            if total >= floor:
                heapq.heappush(heap, (-total, count, depth, rank, parent))
                count += 1

    offer(0.0, 0, 0, 0)
    while heap and len(tokens) < most:
        negative, _, depth, rank, parent = heapq.heappop(heap)
        token, logprob = levels[depth][rank]
        tokens.append(token)
        parents.append(parent)
        offer(-negative - logprob, depth, rank + 1, parent)  # the next best sibling
        offer(-negative, depth + 1, 0, len(tokens))  # the best child
    return tokens, parents


def static_tree(
    choices: Sequence[Sequence[int]], levels: Sequence[Sequence[int]], most: int
) -> tuple[list[int], list[int]]:
    """Lay out a fixed tree, as published for Medusa: each choice is a path of ranks.

    [[0], [1], [0, 0]] is: the best two tokens of the first head, and below the best one the best of
    the second head. Choices that the levels or the tree above them do not reach are left out.
    """
    number: dict[tuple[int, ...], int] = {(): 0}
    tokens: list[int] = []
    parents: list[int] = []
    for choice in sorted(map(tuple, choices), key=lambda path: (len(path), path)):
        above, depth = number.get(choice[:-1]), len(choice) - 1
        if len(tokens) == most or above is None or depth >= len(levels):
            continue
        if choice in number or choice[-1] >= len(levels[depth]):
            continue
        tokens.append(levels[depth][choice[-1]])
        parents.append(above)
        number[choice] = len(tokens)
    return tokens, parents
