"""Single tokens as text and bytes, as log-probabilities show them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from ..text import TextCodec
from ..text.vocabulary import token_bytes
from ..types import TokenLogprob

__all__ = ["Offsets", "TokenTexts"]

LEAST = -9999.0  # JSON has no infinity; OpenAI's value for what cannot be


class TokenTexts:
    """What each token id stands for in the middle of a text."""

    def __init__(self, codec: TextCodec, vocab_size: int) -> None:
        self._bytes = token_bytes(codec, vocab_size)
        self._silent = codec.special_ids

    def text(self, token: int) -> str:
        """Show a token; what is no text by itself shows as its bytes or its id, never like another.

        >>> texts.text(_half_of_a_character)
        'bytes:\\xe4'
        """
        raw = self._bytes[token]
        if not raw:
            return f"token_id:{token}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def spoken(self, token: int) -> bytes:
        """Return what a token adds to an answer's text: control tokens nothing."""
        return b"" if token in self._silent else self._bytes[token]

    def chat(self, told: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Write log-probabilities as chat completions have them."""
        return [
            self._entry(each.token_id, each.logprob)
            | {"top_logprobs": [self._entry(token, logprob) for token, logprob in each.top]}
            for each in told
        ]

    def completion(
        self, told: Sequence[TokenLogprob | int], offsets: Offsets, num_top: int
    ) -> dict[str, list[Any]]:
        """Write log-probabilities as completions have them; an id alone has none (the first).

        `offsets` has counted the characters before the first of these tokens, and goes on.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        places: list[int] = []
        for each in told:
            token = each if isinstance(each, int) else each.token_id
            tokens.append(self.text(token))
            places.append(offsets.pass_by(self.spoken(token)))
            if isinstance(each, int):
                values.append(None)
                tops.append(None)
                continue
            values.append(max(each.logprob, LEAST))
            # The likeliest, and the token itself wherever it stands among them.
            top = dict(each.top[:num_top]) | {token: each.logprob}
            tops.append({self.text(i): max(logprob, LEAST) for i, logprob in top.items()})
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": places,
        }

    def prompt(self, told: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
        """Write a prompt's log-probabilities as vLLM has them: one mapping a token, none first."""
        shown: list[dict[str, Any] | None] = [None]
        for each in told:
            ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(each.top, 1)}
            ranked[each.token_id] = (each.logprob, each.rank)
            shown.append(
                {
                    str(token): {
                        "logprob": max(logprob, LEAST),
                        "rank": rank,
                        "decoded_token": self.text(token),
                    }
                    for token, (logprob, rank) in ranked.items()
                }
            )
        return shown

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spoken = self.spoken(token)
        return {
            "token": self.text(token),
            "logprob": max(logprob, LEAST),
            "bytes": list(spoken) if spoken else None,
        }


class Offsets:
    """Where in a text each token begins; a character that several tokens make counts once."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def pass_by(self, spoken: bytes) -> int:
        """Go past a token, and say where it began."""
        begun = self._num_chars
        self._num_chars += len(self._decoder.decode(spoken))
        return begun
