"""Text between two vocabularies: a request in the draft's tokens, a draft in the target's.

The draft model reads the request's text cut its own way. Only the end is cut anew as it grows: from
the last word on, before which nothing changes. What it drafts is text too; cut into the target's
tokens, its last one is dropped, since more text might make it another.

Half a character at the end of the committed tokens is no text yet. The draft has to begin with that
character, or there is none.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from .speller import Speller
from .vocabulary import Link

__all__ = ["TextContext"]

MAX_RATE = 4.0  # draft tokens for one of the target's
TAIL_TOKENS = 64  # of the target, among which the beginning of a word is looked for


class TextContext:
    """One request as the draft model reads it: a `Context` (`context`)."""

    def __init__(self, link: Link) -> None:
        assert link.spellers is not None, "there is no text between these vocabularies"
        self._link = link
        self._target, self._draft = link.spellers
        self._num_seen = 0  # of the request's tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = bytearray()  # what `ids` spell
        self._tail: list[int] = []  # of the request's tokens
        self.ids: list[int] = []
        self._num_head = 0  # of `ids`, before the text: the one that begins texts, if any
        self._starts: list[int] = []  # where in `_text` each of `ids` begins
        self._is_exact = True  # whether `ids` spell `_text`; else they are cut anew every time

    def update(self, tokens: Sequence[int]) -> int:
        """Take in what the request has become; the first place in `ids` that changed."""
        fresh = list(tokens[self._num_seen :])
        is_first = self._num_seen == 0
        self._num_seen = len(tokens)
        self._tail = list(tokens[-TAIL_TOKENS:])
        if is_first:
            fresh = self._begin(fresh)
        text = self._decoder.decode(self._target.spell(fresh))
        if is_first:
            # Where texts begin with a space that nobody wrote, it is written here once.
            text = text.removeprefix(" ") if self._target.adds_space else text
            text = " " + text if self._draft.adds_space else text
        self._text += text.encode()
        return self._cut_anew()

    def length(self, most: int) -> int:
        """As many as the request itself has for so many of the target's, and one to be dropped."""
        rate = min(len(self.ids) / self._num_seen, MAX_RATE) if self._num_seen else 1.0
        return math.ceil(most * rate) + 1

    def guess(self, drafted: Sequence[int], most: int) -> list[int]:
        """Turn draft tokens into the target's, at most so many."""
        ends = next((i for i, token in enumerate(drafted) if token in self._draft_ends), None)
        pending = self._pending
        text = self._draft.spell(drafted if ends is None else drafted[:ends])
        if not text.startswith(pending):
            return []
        tokens = self._tokens_after(self._committed_tail(pending), text[len(pending) :])
        if ends is None:
            tokens = tokens[:-1]
        elif self._link.target.eos_ids:
            tokens = [*tokens, self._link.target.eos_ids[0]]
        return tokens[:most]

    @property
    def _draft_ends(self) -> tuple[int, ...]:
        return self._link.draft.eos_ids

    @property
    def _pending(self) -> bytes:
        """The beginning of a character that is not complete yet."""
        return self._decoder.getstate()[0]

    def _begin(self, tokens: list[int]) -> list[int]:
        """Begin `ids` as the draft model's texts begin; the rest is text."""
        draft, bos = self._link.draft, self._link.target.bos_id
        begins = bool(tokens) and bos is not None and tokens[0] == bos
        first = draft.bos_id if begins or draft.adds_bos else None
        if first is not None:
            self.ids, self._starts, self._num_head = [first], [0], 1
        return tokens[1:] if begins else tokens

    def _cut_anew(self) -> int:
        """Cut the text into tokens from its last word on."""
        first = self._last_word()
        start = self._starts[first] if first < len(self.ids) else 0
        fresh = self._draft.encode_inside(self._text[start:].decode())
        if fresh is None and start:
            first, start = self._num_head, 0
            fresh = self._draft.encode_inside(self._text.decode())
        self._is_exact = fresh is not None
        if fresh is None:  # a tokenizer that changes text before it cuts it
            size = len(self._draft.bytes_of)
            whole = self._draft.encode_start(self._text.decode())
            fresh = [token for token in whole if token < size]
        changed = first
        while changed < min(len(self.ids), first + len(fresh)):
            if self.ids[changed] != fresh[changed - first]:
                break
            changed += 1
        self.ids[first:] = fresh
        del self._starts[first:]
        for token in fresh:
            self._starts.append(start)
            start += len(self._draft.bytes_of[token])
        return changed

    def _last_word(self) -> int:
        """Find where the last word of `ids` begins: before it, more text changes nothing."""
        if not self._is_exact:
            return self._num_head
        for index in range(len(self.ids) - 1, self._num_head, -1):
            if self._draft.begins_word(self.ids[index]):
                return index
        return self._num_head

    def _committed_tail(self, pending: bytes) -> bytes:
        """Spell the end of the committed tokens from a word's beginning on, if one is near."""
        for count in range(1, len(self._tail) + 1):
            if self._target.begins_word(self._tail[-count]):
                return self._target.spell(self._tail[-count:])
        return pending

    def _tokens_after(self, before: bytes, text: bytes) -> list[int]:
        """Cut text that follows `before` into the target's tokens."""
        joined = _whole_characters(before + text)
        if joined is not None and len(joined.encode()) > len(before):
            ids = self._target.encode_inside(joined)
            after = None if ids is None else _split_at(self._target, ids, len(before))
            if after is not None:
                return after
        # No border of tokens where the committed ones end: they were cut in another way.
        alone = _whole_characters(text)
        ids = self._target.encode_inside(alone) if alone else None
        return ids or []


def _whole_characters(text: bytes) -> str | None:
    """Decode text without what is not whole at its end; None: it is no text."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        return decoder.decode(text)
    except UnicodeDecodeError:
        return None


def _split_at(speller: Speller, ids: Sequence[int], length: int) -> list[int] | None:
    """Drop the tokens that spell the first `length` bytes; None: no token ends there."""
    for index, token in enumerate(ids):
        if length == 0:
            return list(ids[index:])
        length -= len(speller.bytes_of[token])
        if length < 0:
            return None
    return [] if length == 0 else None
