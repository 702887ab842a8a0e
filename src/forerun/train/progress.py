"""How far a run for training data is, and how much it will be: said before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Progress", "expect"]

# What is announced before there is a row to go by.
GUESSED_ANSWER = 150  # tokens
GUESSED_BYTES = 14  # of a row's line per token of its answer, prompt and text included


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is. The first one comes before anything is made: it announces the size."""

    num_rows: int  # there, those of earlier runs included
    num_tokens: int  # of their answers
    num_prompt_tokens: int
    num_bytes: int
    target_tokens: int
    expected_rows: int  # at the end
    expected_bytes: int
    dropped: Mapping[str, int]  # prompts that were not answered, by reason, in this run
    elapsed_s: float  # of this run
    tokens_per_s: float | None  # answer tokens of this run; None before its first batch
    is_done: bool

    @property
    def remaining_s(self) -> float | None:
        """Estimate the time to the end; None before the first batch."""
        if not self.tokens_per_s:
            return None
        return max(self.target_tokens - self.num_tokens, 0) / self.tokens_per_s


def expect(target_tokens: int, num_tokens: int, num_rows: int, num_bytes: int) -> tuple[int, int]:
    """Estimate rows and bytes at the end, by what there is or, before that, by what is usual."""
    if not num_tokens:
        return max(target_tokens // GUESSED_ANSWER, 1), target_tokens * GUESSED_BYTES
    part = max(target_tokens / num_tokens, 1.0)
    return round(num_rows * part), round(num_bytes * part)
