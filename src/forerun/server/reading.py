"""An answer's chunks, read as content and calls."""

from __future__ import annotations

from ..engine.results import Chunk
from ..types import FinishReason
from .tools import ContentDelta, Delta, ToolCallParser

__all__ = ["read_deltas"]


def read_deltas(parser: ToolCallParser | None, chunk: Chunk) -> list[Delta]:
    """Tell content from calls in the next chunk of an answer; without a parser all is content."""
    if parser is None:
        return [ContentDelta(chunk.text)] if chunk.text else []
    deltas = parser.push(chunk.text)
    if chunk.result is not None:
        deltas += parser.finish(truncated=chunk.result.finish_reason is FinishReason.LENGTH)
    return deltas
