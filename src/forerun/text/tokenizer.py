"""A model's tokenizer: text to token ids and back, whole texts at a time.

Streams of single tokens are the detokenizer's; what a chat looks like as text is the template's.
Nothing here changes after construction, so threads may share a codec.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from ..errors import InvalidParameter, InvalidToken, ModelFileError
from .template import ChatTemplate, require_template

__all__ = ["TextCodec"]


class TextCodec:
    """Wrap a `tokenizers.Tokenizer`, which the codec owns from now on (it must not change)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        bos_token: str | None,
        eos_token: str | None,
        add_bos: bool | None,  # None: as the tokenizer file's own post-processor does it
        chat_template: str | None,
    ) -> None:
        # Files written for training often truncate and pad; a prompt must come through whole.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._plain: Tokenizer | None = None
        self._plain_lock = threading.Lock()
        self._chat_source = chat_template
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_id = self._find(bos_token)
        self.eos_id = self._find(eos_token)
        if add_bos is None:
            add_bos = self.bos_id is not None and tokenizer.encode("").ids[:1] == [self.bos_id]
        elif add_bos and self.bos_id is None:
            raise ModelFileError(
                f"the model wants a beginning-of-text token, but its tokenizer has no "
                f"{bos_token!r}; correct bos_token or add_bos_token in tokenizer_config.json"
            )
        self.add_bos = add_bos
        added = tokenizer.get_added_tokens_decoder().items()
        self.special_tokens = {
            token.content: token_id for token_id, token in added if token.special
        }
        self.special_ids = frozenset(self.special_tokens.values())
        self._byte_values = self._find_byte_tokens()
        self._anchor = self._find_anchor()
        self._anchor_len = len(self.decode(self._anchor))

    @property
    def vocab_size(self) -> int:
        """Count the tokens, added ones included; a model's logits may be padded beyond it."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def chat_source(self) -> str | None:
        """The source of the model's chat template."""
        return self._chat_source

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """Compile the model's chat template; `TemplateError` if it has none or a broken one."""
        return require_template(
            self._chat_source, bos_token=self.bos_token, eos_token=self.eos_token
        )

    @property
    def added_tokens(self) -> dict[int, str]:
        """The tokens beside the trained vocabulary, by id: special ones and others."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items()}

    @property
    def decoder_kinds(self) -> frozenset[str]:
        """The names of the tokenizer's decoding steps, such as ByteLevel or ByteFallback."""
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {}
        steps = decoder.get("decoders", [decoder])
        return frozenset(step["type"] for step in steps if "type" in step)

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it, or None for an id that no token has."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Turn text into token ids; special tokens written in it become control tokens.

        With `add_special`, the beginning-of-text token comes first where the model wants one,
        unless the text itself begins with it: one written twice is always a mistake.
        """
        return self._encode(self._tokenizer, text, add_special)

    def encode_plain(self, text: str, *, add_special: bool = False) -> list[int]:
        """Turn text that is not trusted into ids, with special tokens in it read as mere text.

        Only tokens that the tokenizer file marks `special` are; other added tokens still match.
        """
        return self._encode(self._plain_tokenizer(), text, add_special)

    def encode_chat(self, /, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Render messages with the chat template and encode them; it writes its own BOS."""
        return self.encode(self.chat_template.render(messages, **options), add_special=False)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Turn token ids into text; ids that no token has (padding of the logits) are no text."""
        try:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))
        except (OverflowError, TypeError) as error:
            raise InvalidToken(
                f"token ids must be integers from 0 to {self.vocab_size - 1}; "
                f"these are not: {list(ids)[:8]}"
            ) from error

    def decode_after(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode what continues some other text: no leading space is dropped.

        >>> codec.decode([_world]), codec.decode_after([_world])     # SentencePiece's "▁world"
        ("world", " world")
        """
        text = self.decode([*self._anchor, *ids], skip_special=skip_special)
        return text[self._anchor_len :]

    def is_silent(self, token_id: int, *, skip_special: bool = True) -> bool:
        """Say whether decoding passes over this id as if it were not there."""
        if skip_special and token_id in self.special_ids:
            return True
        return self._tokenizer.id_to_token(token_id) is None

    def byte_value(self, token_id: int) -> int | None:
        """Return the byte that a byte-fallback token such as <0xE4> stands for."""
        return self._byte_values.get(token_id)

    def _encode(self, tokenizer: Tokenizer, text: str, add_special: bool) -> list[int]:
        if not isinstance(text, str):
            raise InvalidParameter(f"a prompt must be text, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidParameter(
                f"character {error.start} of the text, U+{ord(text[error.start]):04X}, is half of "
                "a surrogate pair, which no text can hold; send valid Unicode"
            ) from error
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        if add_special and self.add_bos and ids[:1] != [self.bos_id]:
            assert self.bos_id is not None
            return [self.bos_id, *ids]
        return ids

    def _plain_tokenizer(self) -> Tokenizer:
        # The option is state of the whole tokenizer, so it gets one of its own, made when needed.
        with self._plain_lock:
            if self._plain is None:
                plain = Tokenizer.from_str(self._tokenizer.to_str())
                plain.encode_special_tokens = True
                self._plain = plain
            return self._plain

    def _find(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def _find_byte_tokens(self) -> dict[int, int]:
        ids = {self._find(f"<0x{value:02X}>"): value for value in range(256)}
        values = {token_id: value for token_id, value in ids.items() if token_id is not None}
        # Some vocabularies have such tokens, yet decoders that take them for mere text.
        return values if any(self.decode([each]) == "\n" for each in values) else {}

    def _find_anchor(self) -> list[int]:
        for token_id in range(self.vocab_size):
            text = self.decode([token_id])
            if text.isascii() and text.isalnum():
                return [token_id]
        return []  # a vocabulary without words: nothing to drop spaces from either
