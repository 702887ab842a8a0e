"""A request as a draft model reads it, and its drafts as the target does: token by token here.

Where the vocabularies are the same one, ids pass through. Where they share tokens each is replaced
by its like, as long as every one has a like; text is the other way (`retokenise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .vocabulary import NO_TOKEN, Link, LinkKind

__all__ = ["Context", "TokenContext", "UnknownToken"]


class UnknownToken(Exception):
    """A request holds a token that the draft model has no like for."""


class Context(Protocol):
    """One request between two vocabularies."""

    ids: list[int]  # the request in the draft model's tokens

    def update(self, tokens: Sequence[int]) -> int:
        """Take in what the request has become; the first place in `ids` that changed."""

    def length(self, most: int) -> int:
        """Say how many tokens to draft so that `guess` gives about so many."""

    def guess(self, drafted: Sequence[int], most: int) -> list[int]:
        """Turn what the draft model guesses to follow `ids` into the target's, at most so many."""


class TokenContext:
    """A `Context` in which every token has its like."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._num_seen = 0
        self.ids: list[int] = []

    def update(self, tokens: Sequence[int]) -> int:
        """See `Context`.

        Raises:
            UnknownToken: nothing is changed then.
        """
        fresh = list(tokens[self._num_seen :])
        begun = [] if self._num_seen else self._begin(fresh)
        known = self._link.map.to_draft
        mapped = [known[token] for token in fresh]
        if NO_TOKEN in mapped:
            raise UnknownToken(f"token {fresh[mapped.index(NO_TOKEN)]} has no like")
        changed = len(self.ids)
        self.ids += [*begun, *mapped]
        self._num_seen = len(tokens)
        return changed

    def length(self, most: int) -> int:
        return most

    def guess(self, drafted: Sequence[int], most: int) -> list[int]:
        known = self._link.map.to_target
        return [known[token] for token in drafted[:most]]

    def _begin(self, tokens: list[int]) -> list[int]:
        """Say what the draft model's texts begin with where the target's do not, and vice versa.

        What begins texts for the target alone is taken from `tokens`.
        """
        target, draft = self._link.target, self._link.draft
        if self._link.kind is LinkKind.SAME or not tokens:
            return []
        if tokens[0] == target.bos_id:
            if self._link.map.to_draft[tokens[0]] == NO_TOKEN:
                del tokens[0]
            return []
        return [draft.bos_id] if draft.adds_bos and draft.bos_id is not None else []
