"""Text from tokens as they come: never half a character, never part of a stop string.

The law: everything that `push` and `finish` return, joined, is `codec.decode` of all the ids, for
every sequence of ids, valid UTF-8 or not. With a prompt tail it is what the ids add to the tail's
text. One exception, in tokenizers with byte-fallback tokens (Llama's): `codec.decode` turns *each*
byte of an ill-formed run of them into U+FFFD, the well-formed characters before the fault included,
and those have long been sent. Here such a run reads as any other ill-formed UTF-8 does: characters
stay, and each ill-formed part is one U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .tokenizer import TextCodec

__all__ = ["IncrementalDetokenizer"]

REPLACEMENT = "\ufffd"
TAIL_TOKENS = 8  # of the prompt; half a character at its end spans at most three


class IncrementalDetokenizer:
    """Turn one request's tokens into text, and notice stop strings in the text.

    Push a verified block's tokens one by one and stop once `stopped` is set: the token just pushed
    completed the stop string. The text ends before the stop string that is *completed* first; of
    several that end in the same character, before the longest. Neither depends on token borders.
    (It is also the one that starts first, unless one stop string contains another.)
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        stop_strings: tuple[str, ...] = (),
        min_tokens: int = 0,  # the text of so many first tokens is not searched for stop strings
        skip_special: bool = True,
        prompt_tail: Sequence[int] = (),  # tokens right before the first; the whole prompt will do
    ) -> None:
        self._characters = _CharacterStream(codec, skip_special=skip_special)
        for token_id in self._audible_tail(codec, prompt_tail, skip_special):
            self._characters.push(token_id)  # its text is the prompt's; half a character stays
        self._stops = [_StopString(stop) for stop in stop_strings]
        self._num_unsearched = min_tokens
        self._withheld = ""  # certain, but it could still become a stop string
        self._parts: list[str] = []
        self._stopped: str | None = None
        self._finished = False

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stopped

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._parts)

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that has become certain."""
        assert self._stopped is None, "a token was pushed after the stop string"
        assert not self._finished, "a token was pushed after finish()"
        text = self._characters.push(token_id)
        if self._num_unsearched:
            self._num_unsearched -= 1
            return self._emit(text)
        return self._emit(self._scan(text))

    def finish(self) -> str:
        """Return the rest: what was withheld, and U+FFFD for half a character."""
        assert not self._finished, "finish() was called twice"
        self._finished = True
        if self._stopped is not None:
            return ""
        certain = self._scan(self._characters.finish())
        if self._stopped is None:
            certain += self._withheld
            self._withheld = ""
        return self._emit(certain)

    def _scan(self, text: str) -> str:
        if not self._stops or not text:
            return text
        for index, character in enumerate(text):
            matches = [stop for stop in self._stops if stop.advance(character)]
            if matches:
                longest = max(matches, key=lambda stop: len(stop.text))
                self._stopped = longest.text
                seen = self._withheld + text[: index + 1]
                self._withheld = ""
                return seen[: len(seen) - len(longest.text)]
        seen = self._withheld + text
        cut = len(seen) - max(stop.num_matched for stop in self._stops)
        self._withheld = seen[cut:]
        return seen[:cut]

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text

    @staticmethod
    def _audible_tail(codec: TextCodec, prompt: Sequence[int], skip_special: bool) -> list[int]:
        tail: list[int] = []
        for token_id in reversed(prompt):
            if len(tail) == TAIL_TOKENS:
                break
            if not codec.is_silent(token_id, skip_special=skip_special):
                tail.append(token_id)
        return tail[::-1]


class _CharacterStream:
    """Whole characters from tokens, each as soon as no further token can change it."""

    def __init__(self, codec: TextCodec, *, skip_special: bool) -> None:
        self._codec = codec
        self._skip_special = skip_special
        self._at_start = True  # a leading space of the first token may not be text
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")  # of byte-fallback tokens
        # Byte-level tokens from the last character border on, and what they decode to so far:
        #   text[:num_sent]  returned         text[num_sent:]  U+FFFD that may become a character
        self._window: list[int] = []
        self._window_text = ""
        self._num_sent = 0

    def push(self, token_id: int) -> str:
        if self._codec.is_silent(token_id, skip_special=self._skip_special):
            return ""
        own = self._decode([token_id])
        byte = self._codec.byte_value(token_id)
        if byte is not None:
            # In ASCII the codec's word counts: it drops a leading space, byte or not.
            dropped = self._at_start and own == ""
            self._at_start = False
            return self._flush_window() + ("" if dropped else self._bytes.decode(bytes([byte])))
        before = self._bytes.decode(b"", final=True)
        if self._window:
            # The border before this token parts two characters if decoding either side alone
            # gives the same: half a character and its rest would be one more U+FFFD when apart.
            # So a window never outgrows the four bytes that a character can have.
            joined = self._decode([*self._window, token_id])
            if own == "" or joined != self._window_text + own:
                self._window.append(token_id)
                self._window_text = joined
                return before + self._send_certain()
            before += self._flush_window()
        self._window = [token_id]
        self._window_text = own
        return before + self._send_certain()

    def finish(self) -> str:
        return self._bytes.decode(b"", final=True) + self._flush_window()

    def _send_certain(self) -> str:
        certain = len(self._window_text.rstrip(REPLACEMENT))
        fresh = self._window_text[self._num_sent : certain]
        self._num_sent = max(self._num_sent, certain)
        if certain == len(self._window_text):
            self._flush_window()
        return fresh

    def _flush_window(self) -> str:
        rest = self._window_text[self._num_sent :]
        if self._window:
            self._at_start = False
        self._window, self._window_text, self._num_sent = [], "", 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        decode = self._codec.decode if self._at_start else self._codec.decode_after
        return decode(ids, skip_special=self._skip_special)


class _StopString:
    """A stop string and how much of it the text so far ends with (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        assert text, "an empty stop string stops before the first token"
        self.text = text
        self.num_matched = 0  # the longest prefix of the stop string that is a suffix of the text
        # borders[n]: the longest proper prefix of text[:n] that is its suffix; "aab" -> 0, 0, 1, 0
        self._borders = [0, 0]
        for character in text[1:]:
            self._borders.append(self._extend(self._borders[-1], character))

    def advance(self, character: str) -> bool:
        """Take one more character of the text; say whether it completes the stop string."""
        self.num_matched = self._extend(self.num_matched, character)
        return self.num_matched == len(self.text)

    def _extend(self, length: int, character: str) -> int:
        while length and self.text[length] != character:
            length = self._borders[length]
        return length + (self.text[length] == character)
