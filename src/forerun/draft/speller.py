"""A tokenizer as bytes: what its tokens spell, and which tokens spell a text in its middle."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from ..text import TextCodec
from ..text.vocabulary import token_bytes

__all__ = ["Speller"]

# Words, line ends, digits, letters of two, three and four bytes.
PROBE = "Hello, world!\n\tint x = 1203; straße naïve привет 你好 🙂"


class Speller:
    """One vocabulary, read-only."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        codec = TextCodec(
            tokenizer, bos_token=None, eos_token=None, add_bos=False, chat_template=None
        )
        self._tokenizer = tokenizer
        self.bytes_of = token_bytes(codec, vocab_size)
        added = codec.added_tokens
        self.added = frozenset(token for token in added if token < vocab_size)
        self.byte_tokens = frozenset(
            token for token in range(vocab_size) if codec.byte_value(token) is not None
        )
        # SentencePiece's way: every text begins with a space that nobody wrote.
        self.adds_space = self.spell(self._encode("a")) == b" a"

    @property
    def spells_any_text(self) -> bool:
        """Whether tokens can be found for texts of any kind; without byte tokens they cannot."""
        return self.encode_inside(" " + PROBE) is not None

    def spell(self, ids: Sequence[int]) -> bytes:
        """Join what tokens stand for."""
        size = len(self.bytes_of)
        return b"".join(self.bytes_of[token] for token in ids if token < size)

    def encode_inside(self, text: str) -> list[int] | None:
        """Find the tokens of a text that stands in the middle of another, or at a border of words.

        None: there are none that spell exactly this. Where the tokenizer adds a space in front,
        only what begins with one can be had.
        """
        if self.adds_space:
            if not text.startswith(" "):
                return None
            ids = self._encode(text[1:])
        else:
            ids = self._encode(text)
        return ids if self.spell(ids) == text.encode() else None

    def encode_start(self, text: str) -> list[int]:
        """Find the tokens of a whole text as nearly as there are any."""
        return self._encode(text)

    def begins_word(self, token: int) -> bool:
        """Say whether a token is a space and what follows it: texts may be cut before it."""
        spelled = self.bytes_of[token]
        return len(spelled) > 1 and spelled[:1] == b" " and not spelled[1:2].isspace()

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
