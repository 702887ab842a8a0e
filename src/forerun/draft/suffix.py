"""Suffix look-up: guess what followed the newest tokens most often, as far as that is likely.

Prompt look-up copies the latest place that looks alike. Here every place counts: a tree holds what
followed each run of up to `DEPTH` tokens and how often, so a continuation that was always the same
is followed far, and one that came out differently each time is not followed at all (SuffixDecoding,
2411.04975, without its store of other requests). A step costs the same at any context length.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..types import DraftRequest, Features, Proposal, RequestOutcome
from .base import Abilities

__all__ = ["SuffixDrafter", "SuffixTree"]

DEPTH = 7  # longest run of tokens that is told apart
# How likely the likeliest next token is, fitted on verified text (docs/notes.md): seen c times of
# N behind a run of n tokens, c / (N + DOUBT / n ** SURENESS).
DOUBT = 2.0
SURENESS = 1.25
RATE = 1.5  # tokens of a pass: a row that costs c of a pass must bring at least c x this many
LEAST = (
    0.06  # less likely than this nothing is drafted, however cheap: being wrong costs a cache row
)


class SuffixDrafter:
    """The likeliest continuation of each request's own tokens."""

    abilities = Abilities(method="suffix")

    def __init__(self) -> None:
        self._trees: dict[int, SuffixTree] = {}

    def start(self, request: DraftRequest) -> None:
        self._trees[request.request_id] = SuffixTree()

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        return Proposal.from_lists([self._guess(request) for request in requests])

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        """Learn nothing here: the tokens themselves tell, when the next guess is due."""

    def finish(self, request_id: int) -> None:
        self._trees.pop(request_id, None)

    def _guess(self, request: DraftRequest) -> list[int]:
        if request.max_draft == 0:
            return []
        tree = self._trees[request.request_id]
        tree.extend(request.tokens)
        return tree.guess(request.max_draft, max(LEAST, RATE * request.row_cost))


class SuffixTree:
    """How often each run of tokens occurred, and what its likeliest next token is.

    A node is a run of 1 to `DEPTH` + 1 tokens: `[7, 8, 7, 9]` has [7] twice, [7, 8], [7, 9], ...
    Node 0 is the empty run.
    """

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}  # (node, next token) -> node
        self._tokens = [-1]  # the last token of each node's run
        self._counts = [0]
        self._followed = [0]  # how often something came after the run
        self._likeliest = [0]  # the child with the highest count, the latest of several; 0: none
        self._newest: list[int] = [0]  # nodes of the runs that end here, shortest first
        self._num_indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the tokens that were added since the last call."""
        for token in tokens[self._num_indexed :]:
            longer = [self._append(node, token) for node in self._newest]
            self._newest = [0, *longer[:DEPTH]]
        self._num_indexed = len(tokens)

    def guess(self, most: int, least: float) -> list[int]:
        """Follow the likeliest continuation while it is more likely than `least` to hold so far."""
        draft: list[int] = []
        nodes, likely = self._newest, 1.0
        while len(draft) < most:
            # The longest run that was followed by anything; the empty one tells nothing.
            length = len(nodes) - 1
            while length > 0 and not self._likeliest[nodes[length]]:
                length -= 1
            if length == 0:
                break
            node = nodes[length]
            best = self._likeliest[node]
            likely *= self._counts[best] / (self._followed[node] + DOUBT / length**SURENESS)
            if likely < least:
                break
            token = self._tokens[best]
            draft.append(token)
            nodes = self._after(nodes[: length + 1], token)
        return draft

    def _append(self, node: int, token: int) -> int:
        child = self._children.get((node, token))
        if child is None:
            child = self._children[node, token] = len(self._tokens)
            self._tokens.append(token)
            self._counts.append(0)
            self._followed.append(0)
            self._likeliest.append(0)
        self._counts[child] += 1
        self._followed[node] += 1
        best = self._likeliest[node]
        if not best or self._counts[child] >= self._counts[best]:
            self._likeliest[node] = child
        return child

    def _after(self, nodes: Sequence[int], token: int) -> list[int]:
        """The runs that end in `token` once it comes after these, as far as they are known."""
        longer = [0]
        for node in nodes[:DEPTH]:
            child = self._children.get((node, token))
            if child is None:
                break
            longer.append(child)
        return longer
