"""Which tokens a head may propose: those that the target's own answers use most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..errors import ConfigError
from .rows import Row

__all__ = ["choose_draft_ids", "coverage", "single_bytes"]


def choose_draft_ids(
    rows: Iterable[Row], size: int, vocab_size: int, always: Iterable[int]
) -> Tensor | None:  # [D] int64, rising
    """Choose `size` tokens: those of `always`, then the most frequent ones of the answers.

    What is left is filled with the lowest ids, which tokenizers learnt first. None: all tokens.

    Raises:
        ConfigError: `size` does not hold what it must, or is more than there are.
    """
    if size == vocab_size:
        return None
    kept = sorted({each for each in always if 0 <= each < vocab_size})
    if not max(len(kept), 1) <= size < vocab_size:
        raise ConfigError(
            f"a draft vocabulary of {size} tokens; it holds {len(kept)} single bytes and ends of "
            f"turns, and the model has {vocab_size} tokens: ask for {max(len(kept), 1)}.."
            f"{vocab_size}"
        )
    counts = Counter(token for row in rows for token in row.answer_ids)
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    order = dict.fromkeys([*kept, *frequent, *range(vocab_size)])  # keeps the first of each
    return torch.tensor(sorted(list(order)[:size]))


def coverage(rows: Iterable[Row], draft_ids: Tensor | None) -> float:
    """Say which share of the answers' tokens the draft vocabulary holds."""
    if draft_ids is None:
        return 1.0
    known = set(draft_ids.tolist())
    tokens = [token for row in rows for token in row.answer_ids]
    return sum(token in known for token in tokens) / max(len(tokens), 1)


def single_bytes(tokens: Mapping[str, int]) -> list[int]:
    """List the tokens that stand for one byte, of which any text can be made: one character
    (byte-level vocabularies write each byte as one), or <0x0A> as SentencePiece spells bytes.
    """
    return sorted(
        id
        for token, id in tokens.items()
        if (len(token) == 1 and ord(token) < 0x180) or (len(token) == 6 and token[:3] == "<0x")
    )
