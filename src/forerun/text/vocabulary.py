"""Which bytes each token stands for in the middle of a text: a vocabulary without its tokenizer.

Joined, the bytes of a text's tokens are the text's, but for a space that a tokenizer of words puts
before the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .tokenizer import TextCodec

__all__ = ["token_bytes"]

_WORD_BORDER = "\u2581"  # SentencePiece writes a space as this
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def token_bytes(codec: TextCodec, vocab_size: int) -> list[bytes]:
    """List the bytes of the ids 0 to vocab_size - 1; no bytes for an id that no token has.

    An added token, special ones too, stands for its own name.
    """
    added = codec.added_tokens
    spell = _spelling(codec)
    table = []
    for token_id in range(vocab_size):
        token = codec.token(token_id)
        if token is None:
            table.append(b"")
        elif token_id in added:
            table.append(added[token_id].encode())
        else:
            table.append(spell(token))
    return table


def _spelling(codec: TextCodec) -> Callable[[str], bytes]:
    # What the decoder does tells the kind; a vocabulary's look does not (a byte-level one can
    # hold a token that looks like SentencePiece's, and the other way round).
    kinds = codec.decoder_kinds
    if "ByteLevel" in kinds:
        return _byte_level
    falls_back = "ByteFallback" in kinds
    borders = "Metaspace" in kinds or "Replace" in kinds

    def pieces(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if falls_back else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return (token.replace(_WORD_BORDER, " ") if borders else token).encode()

    return pieces


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_GPT2_BYTES[character] for character in token)
    except KeyError:
        return token.encode()  # no tokenizer's own: the decoder takes it for mere text too


def _gpt2_alphabet() -> dict[str, int]:
    """Map GPT-2's 256 visible characters to bytes: a printable byte is itself, others follow."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in printable]
    alphabet = {chr(value): value for value in printable}
    return alphabet | {chr(0x100 + place): value for place, value in enumerate(hidden)}


_GPT2_BYTES = _gpt2_alphabet()
