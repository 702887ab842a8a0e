"""Single tokens as text and bytes, as log-probabilities show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..text import TextCodec
from ..text.vocabulary import token_bytes
from ..types import TokenLogprob

__all__ = ["TokenTexts"]

LEAST = -9999.0  # JSON has no infinity; OpenAI's value for what cannot be


class TokenTexts:
    """What each token id stands for in the middle of a text."""

    def __init__(self, codec: TextCodec, vocab_size: int) -> None:
        self._bytes = token_bytes(codec, vocab_size)

    def text(self, token: int) -> str:
        """Show a token; half a character shows as U+FFFD."""
        return self._bytes[token].decode("utf-8", "replace")

    def chat(self, told: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Write log-probabilities as chat completions have them."""
        return [
            self._entry(each.token_id, each.logprob)
            | {"top_logprobs": [self._entry(token, logprob) for token, logprob in each.top]}
            for each in told
        ]

    def completion(
        self, told: Sequence[TokenLogprob | int], offset: int, num_top: int
    ) -> dict[str, list[Any]]:
        """Write log-probabilities as completions have them; an id alone has none (the first).

        `offset` counts the characters before the first of these tokens.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for each in told:
            token = each if isinstance(each, int) else each.token_id
            text = self.text(token)
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
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
            "text_offset": offsets,
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
        return {
            "token": self.text(token),
            "logprob": max(logprob, LEAST),
            "bytes": list(self._bytes[token]),
        }
