"""Why an answer ended and which of its tokens had been guessed, in the words that clients know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.results import Chunk, GenerationResult
from ..types import FinishReason

__all__ = ["finish_reason", "marks", "stop_reason"]


def finish_reason(result: GenerationResult) -> str:
    """Say why an answer ended, in OpenAI's words."""
    return "length" if result.finish_reason is FinishReason.LENGTH else "stop"


def stop_reason(eos_token_ids: Sequence[int], result: GenerationResult) -> int | str | None:
    """Say which stop string or token ended an answer, as vLLM does; the model's own end is none."""
    if result.stopped_by in eos_token_ids:
        return None
    return result.stopped_by


def marks(chunk: Chunk) -> dict[str, Any]:
    """Say which of a chunk's tokens had been guessed: the first `num_accepted`, and by whom."""
    return {
        "num_accepted": chunk.num_accepted,
        "drafter": chunk.method,
        "pieces": list(chunk.pieces),
    }
