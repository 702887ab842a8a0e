"""Where one request stands in its grammar: which tokens may come next, now and along a draft.

Of the engine's one thread. A draft never changes the state: what a draft's tokens did is undone,
and if they led the matcher into an error, which it never leaves, it is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidConstraint
from .masks import num_words, pack_masks, unpack_masks
from .matching import error_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Grammar", "GrammarState", "TokenKinds"]

MAX_FORKS = 128  # next tokens; a text that is forced has a handful of prefixes
BYTES_PER_TOKEN = 4  # of forced text, as it is looked for: each byte costs a mask


class TokenKinds:
    """What the ids of a vocabulary are good for; shared by all grammars."""

    def __init__(
        self,
        tokens: list[bytes],
        eos_ids: Sequence[int],
        vocab_size: int,  # of the logits
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = tokens
        self.vocab_size = vocab_size
        self._encode = encode
        self.eos_ids = frozenset(eos_ids)
        # Without an end-of-text token one is made up behind the last, where no row reaches.
        self.matcher_size = len(tokens)
        known = np.array([bool(token) for token in tokens], dtype=np.bool_)[:vocab_size]
        known[[each for each in eos_ids if each < vocab_size]] = True
        ends = np.zeros(vocab_size, dtype=np.bool_)
        ends[[each for each in eos_ids if each < vocab_size]] = True
        self.known = known  # [V]
        self.known_words = pack_masks(known[None])[0]  # [W]
        self.eos_words = pack_masks(ends[None])[0]  # [W]

    def cut(self, text: bytes) -> list[int]:
        """Cut a text into tokens as the tokenizer does in the middle of a text, if it can."""
        try:
            ids = self._encode(text.decode())
        except UnicodeDecodeError:
            return []  # half a character: not worth a guess
        # A tokenizer of words puts a space before the first.
        for start in (0, 1):
            if b"".join(self.tokens[each] for each in ids[start:]) == text:
                return ids[start:]
        return []


class Grammar:
    """A compiled constraint; never changes, so threads and requests share it."""

    def __init__(self, matcher: LLMatcher, kinds: TokenKinds) -> None:
        self._matcher = matcher
        self.kinds = kinds
        # The library notices that a text is whole when a token was taken, not before the first.
        start = GrammarState(self)
        self.is_empty = start.may_end and bool((start.masks([]) == kinds.eos_words).all())

    def start(self) -> GrammarState:
        """Begin one request's output."""
        return GrammarState(self)

    def fresh_matcher(self) -> LLMatcher:
        return self._matcher.deep_copy()


class GrammarState:
    """One request's place in its grammar.

    Raises:
        InvalidConstraint: from any method, when the grammar turns out to be more than can be
            followed. The request is over then; the state must not be used again.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._kinds = grammar.kinds
        self._matcher = grammar.fresh_matcher()
        self._tokens: list[int] = []  # committed, end-of-text not among them
        self._ended = False
        self._row = np.zeros(num_words(self._kinds.matcher_size), dtype=np.int32)

    @property
    def may_end(self) -> bool:
        """Whether the text satisfies the constraint as it stands."""
        return self._ended or self._matcher.is_accepting()

    @property
    def must_end(self) -> bool:
        """Whether nothing but end-of-text can follow."""
        if self._ended:
            return True
        if self._matcher.is_error():
            return False
        return self._matcher.is_stopped() or (not self._tokens and self._grammar.is_empty)

    def count_legal(self, tokens: Sequence[int]) -> int:
        """Count the leading tokens that may follow in this order; nothing follows end-of-text."""
        legal = self._legible(tokens)
        if self.must_end:
            return int(not self._ended and legal[:1] != [] and legal[0] in self._kinds.eos_ids)
        if not legal:
            return 0
        count = self._matcher.validate_tokens(legal)
        if self._matcher.is_error():
            self._renew()  # the draft's doing; without it the text may well go on
            return 0
        return count

    def masks(self, draft: Sequence[int]) -> NDArray[np.int32]:  # [K + 1, W]
        """Say which tokens may follow each prefix of a draft, all of which must be legal.

        Bit t % 32 of word t // 32 is token t. Where a text ends only end-of-text is allowed. A row
        is empty, and so are those after it, where the draft led beyond what can be followed.
        """
        rows = np.zeros((len(draft) + 1, len(self._kinds.eos_words)), dtype=np.int32)
        if self._ended:
            rows[0] = self._kinds.eos_words
            return rows
        if not self._fill(rows[0]):
            # Perhaps earlier drafts had used up the matcher's allowance: once more, without them.
            self._renew()
            if not self._fill(rows[0]):
                raise InvalidConstraint(self._complaint())
        num_taken = 0
        for row, token in zip(rows[1:], draft, strict=True):
            if token in self._kinds.eos_ids:
                row[:] = self._kinds.eos_words
                break
            if not self._matcher.consume_token(token):
                break
            num_taken += 1
            if not self._fill(row):
                break
        if self._matcher.is_error() or not self._matcher.rollback(num_taken):
            self._renew()
        return rows

    def likely_forced(self, max_tokens: int = 16) -> list[int]:
        """Guess tokens where the constraint leaves no choice of text, as the tokenizer cuts it.

        The text is forced, but other ways to cut it into tokens are legal too. So this is a draft
        like any other: verified, and the distribution stays exact.
        """
        text, num_taken = b"", 0
        row = np.zeros_like(self._kinds.eos_words)
        while not self._ended and len(text) < BYTES_PER_TOKEN * max_tokens and self._fill(row):
            token = self._only_start(row)
            if token is None or not self._matcher.consume_token(token):
                break
            text += self._kinds.tokens[token]
            num_taken += 1
        if self._matcher.is_error() or not self._matcher.rollback(num_taken):
            self._renew()
        guess = self._kinds.cut(text)
        if guess and not self._kinds.eos_ids.isdisjoint(self._ids(row) or ()):
            return guess[:max_tokens]  # the text is whole
        return guess[:-1][:max_tokens]  # the last may be the beginning of a longer token

    def advance(self, tokens: Sequence[int]) -> None:
        """Commit tokens that were emitted."""
        for token in tokens:
            if self._ended:
                raise InvalidConstraint("a token was emitted after the end of the text")
            if token in self._kinds.eos_ids:
                if not self.may_end and not self._matcher.validate_tokens([token]):
                    raise InvalidConstraint("the text ended before it satisfied the constraint")
                self._ended = True
            elif self._legible([token]) and self._matcher.consume_token(token):
                self._tokens.append(token)
            else:
                raise InvalidConstraint(self._complaint())

    def _legible(self, tokens: Sequence[int]) -> list[int]:
        """Take tokens up to the first that stands for nothing, and to end-of-text at most."""
        legible = []
        for token in tokens:
            if not 0 <= token < self._kinds.vocab_size or not self._kinds.known[token]:
                break
            legible.append(int(token))
            if token in self._kinds.eos_ids:
                break
        return legible

    def _fill(self, row: NDArray[np.int32]) -> bool:  # [W]
        """Write what may come next where the matcher stands; say whether there is anything."""
        if self._matcher.is_error():
            return False
        if self._matcher.is_stopped():
            row[:] = self._kinds.eos_words
            return True
        self._matcher.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        # After an error the library allows end-of-text, which would cut the text short.
        if self._matcher.is_error():
            return False
        np.bitwise_and(self._row[: len(row)], self._kinds.known_words, out=row)
        return True

    def _ids(self, row: NDArray[np.int32]) -> list[int] | None:  # [W]
        """List the tokens of a row; None if they are more than a forced text can have."""
        if not 0 < np.count_nonzero(row) <= MAX_FORKS:
            return None
        ids: list[int] = np.flatnonzero(unpack_masks(row[None], self._kinds.vocab_size)).tolist()
        return ids if len(ids) <= MAX_FORKS else None

    def _only_start(self, row: NDArray[np.int32]) -> int | None:
        """Find the token that all legal ones begin with: [n, na, name] -> n."""
        ids = self._ids(row)
        if ids is None or not self._kinds.eos_ids.isdisjoint(ids):
            return None
        table = self._kinds.tokens
        shortest = min(ids, key=lambda each: len(table[each]))
        return shortest if all(table[each].startswith(table[shortest]) for each in ids) else None

    def _renew(self) -> None:
        """Make the matcher anew from the committed tokens: an error does not go away otherwise."""
        self._matcher = self._grammar.fresh_matcher()
        if self._tokens:
            self._matcher.consume_tokens(self._tokens)

    def _complaint(self) -> str:
        reason = error_of(self._matcher) or "it allows no token that the vocabulary has"
        return f"the constraint cannot be followed any further: {reason}; make it simpler"
