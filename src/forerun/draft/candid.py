"""Drafters that say how likely their guesses are: what choosing among drafters asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..types import DraftRequest

__all__ = ["Candid", "Guess"]


@dataclass(frozen=True, slots=True)
class Guess:
    """One drafter's guess for one request."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] | None = None  # see `Proposal.parents`; None: one path
    # How likely each token is to hold once those before it do; None: the drafter does not say
    chances: Sequence[float] | None = None

    def count_held(self, text: Sequence[int]) -> int:
        """Count the tokens of the text that came, from the first on, that were guessed."""
        parents = range(len(self.tokens)) if self.parents is None else self.parents
        pairs = zip(parents, self.tokens, strict=True)
        nodes = {pair: node for node, pair in enumerate(pairs, 1)}
        node = 0
        for count, token in enumerate(text):
            found = nodes.get((node, token))
            if found is None:
                return count
            node = found
        return len(text)

    @property
    def depth(self) -> int:
        """The length of its longest path."""
        if self.parents is None:
            return len(self.tokens)
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)


@runtime_checkable
class Candid(Protocol):
    """A drafter that can be asked about one request, at the cost of a look-up."""

    def guess_with_chances(self, request: DraftRequest) -> Guess:
        """Guess with chances, further than `propose` would where rows are dear."""
