"""Prompt look-up: guess that what followed the last few tokens before will follow them again.

The draft is copied from the request's own tokens, never from another request's. Its length follows
the evidence: the more tokens before the copied place agree with the newest ones, the further it
runs ahead. The index grows with the tokens: a step costs the same at 100 tokens of context as at
100,000.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..types import DraftRequest, Features, Proposal, RequestOutcome
from .base import Abilities
from .candid import Guess

__all__ = [
    "NgramDrafter",
    "NgramIndex",
    "continuation",
    "draft_length",
    "match_chance",
    "matched_length",
]


DEAR_ROW = 0.05  # of a pass over one row: from there on short drafts win
LONG_MATCH = 16  # tokens; a longer match is no surer
LEAST_SAID = 0.02  # what is less likely is not told to who chooses among drafters


class NgramDrafter:
    """Longest suffix first, from `longest` down to `shortest` tokens; its latest occurrence."""

    abilities = Abilities(method="ngram")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._indexes: dict[int, NgramIndex] = {}

    def start(self, request: DraftRequest) -> None:
        self._indexes[request.request_id] = NgramIndex(self._shortest, self._longest)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        return Proposal.from_lists([self._guess(request) for request in requests])

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        """Learn nothing here: the tokens themselves tell, when the next guess is due."""

    def finish(self, request_id: int) -> None:
        self._indexes.pop(request_id, None)

    def guess_with_chances(self, request: DraftRequest) -> Guess:
        """Follow the match while it is at all likely to hold, and say how likely (`candid`)."""
        place = self._find(request)
        if place is None:
            return Guess(chances=())
        matched = matched_length(request.tokens, place, LONG_MATCH)
        chances, holds = [], 1.0
        for held in range(request.max_draft):
            chance = match_chance(matched + held)  # a copy that has held so far is a longer match
            holds *= chance
            if holds < LEAST_SAID:
                break
            chances.append(chance)
        return Guess(continuation(request.tokens, place, len(chances)), chances=chances)

    def _guess(self, request: DraftRequest) -> list[int]:
        place = self._find(request)
        if place is None:
            return []
        matched = matched_length(request.tokens, place, request.max_draft)
        length = draft_length(matched, request.row_cost)
        return continuation(request.tokens, place, min(length, request.max_draft))

    def _find(self, request: DraftRequest) -> int | None:
        if request.max_draft == 0:
            return None
        index = self._indexes[request.request_id]
        index.extend(request.tokens)
        return index.find(request.tokens)


class NgramIndex:
    """Where each run of `shortest` to `longest` tokens last occurred with something after it."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(shortest, longest + 1)
        # One table per length: run of tokens -> position of the token that followed it.
        self._followers: list[dict[tuple[int, ...], int]] = [{} for _ in self._sizes]
        self._num_indexed = 0  # tokens whose preceding runs are in the tables

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the tokens that were added since the last call; later occurrences win."""
        for place in range(max(1, self._num_indexed), len(tokens)):
            window = tuple(tokens[max(0, place - self._sizes[-1]) : place])
            for size, table in zip(self._sizes, self._followers, strict=True):
                if size > len(window):
                    break
                table[window[-size:]] = place
        self._num_indexed = len(tokens)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Find what followed the longest known suffix: [7, 8, 9, 7, 8] -> 2, the place of 9."""
        window = tuple(tokens[-self._sizes[-1] :])
        for size, table in zip(reversed(self._sizes), reversed(self._followers), strict=True):
            if size <= len(window):
                place = table.get(window[-size:])
                if place is not None:
                    return place
        return None


def draft_length(num_matched: int, row_cost: float) -> int:
    """Say how far a match of so many tokens is worth following: 1 -> 3, 7 -> 15; dear rows: 1, 7.

    Measured on eight kinds of prompt (docs/notes.md): where rows are nearly free 7 % more than a
    fixed length of 15; where each adds a seventh of a pass, 9 % more than where they are free.
    """
    return num_matched if row_cost > DEAR_ROW else 2 * num_matched + 1


def match_chance(num_matched: int) -> float:
    """Say how likely the token behind a match is to come again: 1 -> 0.22, 4 -> 0.69, 16 -> 0.92.

    Fitted on verified text (docs/notes.md).
    """
    return num_matched / (num_matched + 1.2 + 2.3 / num_matched)


def matched_length(tokens: Sequence[int], place: int, most: int) -> int:
    """Count the tokens before `place` that equal the newest ones: [5, 7, 8, 9, 7, 8], 3 -> 2."""
    length = 0
    while length < min(most, place) and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def continuation(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """Copy `count` tokens from `place` on, running into the copy itself where the text ends.

    [1, 2, 1, 2], place 2, count 5 -> [1, 2, 1, 2, 1]: a repetition is guessed to go on.
    """
    draft = list(tokens[place : place + count])
    while len(draft) < count:
        draft.append(draft[len(draft) - (len(tokens) - place)])
    return draft
