"""Which written prompts are worth an answer: no repetition, no rubbish, nothing said before."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

__all__ = ["Seen", "end_whole", "fault_of", "is_loop", "is_repetitive"]

MIN_PROMPT_BYTES = 8
MIN_PROMPT_TOKENS = 3
REPLACEMENT = "\ufffd"
MIN_BYTES = 60  # in shorter texts zlib's own header weighs too much
MAX_RATIO = 2.4  # English prose of such length has 1.2 to 1.9
GRAM = 8
MAX_KNOWN = 0.5
MAX_PERIOD = 64
MIN_LOOP = 24  # tokens; "ha ha ha" and rows of dashes are no loops yet
REPEATS = 3
ENDS = (".", "!", "?", "\n", "\u3002", "\uff01", "\uff1f", '."', '?"', '!"', ".)", "`")


def is_repetitive(text: str) -> bool:
    """Say whether a text says the same over and over: it compresses too well."""
    data = text.encode()
    return len(data) >= MIN_BYTES and len(data) / len(zlib.compress(data, 9)) > MAX_RATIO


def fault_of(text: str, num_tokens: int) -> str | None:
    """Say why a written prompt is worth no answer, or None."""
    if len(text.encode()) < MIN_PROMPT_BYTES or num_tokens < MIN_PROMPT_TOKENS:
        return "too short"
    if is_repetitive(text):
        return "repetitive"
    if any(char == REPLACEMENT or (ord(char) < 32 and char not in "\t\n") for char in text):
        return "not text"
    return None


def end_whole(text: str) -> str:
    """Cut a text that ran out of tokens back to its last whole sentence or line, or to nothing."""
    last = max(text.rfind(end) + len(end) if end in text else 0 for end in ENDS)
    return text[:last].rstrip()


def is_loop(ids: Sequence[int], end: int) -> bool:
    """Say whether the tokens before `end` are one piece, said three times or more.

    [9, 1, 2, 1, 2, 1, 2, ...] is a loop once there are `MIN_LOOP` tokens of it.
    """
    for period in range(1, MAX_PERIOD + 1):
        length = max(REPEATS * period, MIN_LOOP)
        if length > end:
            return False
        # The first comparison settles it nearly always.
        if ids[end - 1] == ids[end - 1 - period] and all(
            ids[end - 1 - back] == ids[end - 1 - back - period]
            for back in range(1, length - period)
        ):
            return True
    return False


class Seen:
    """What prompts said before, to notice the same and nearly the same."""

    def __init__(self) -> None:
        self._whole: set[tuple[int, ...]] = set()
        self._grams: set[int] = set()

    def knows(self, ids: Sequence[int]) -> bool:
        """Say whether these tokens came before, or half of their runs of eight did."""
        if self.knows_whole(ids):
            return True
        grams = _grams(ids)
        known = sum(gram in self._grams for gram in grams)
        return known > MAX_KNOWN * len(grams)

    def knows_whole(self, ids: Sequence[int]) -> bool:
        """Say whether exactly these tokens came before."""
        return tuple(ids) in self._whole

    def add(self, ids: Sequence[int]) -> None:
        self._whole.add(tuple(ids))
        self._grams.update(_grams(ids))


def _grams(ids: Sequence[int]) -> set[int]:
    # Hashes of tuples of integers are the same in every process.
    last = max(len(ids) - GRAM, 0)
    return {hash(tuple(ids[start : start + GRAM])) for start in range(last + 1)}
