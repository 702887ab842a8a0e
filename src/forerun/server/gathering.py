"""Fewer, bigger chunks: those of a few tokens each are put together before they are sent.

It spares clients and network, and hides how many tokens a single step gave.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from ..engine.results import Chunk
from .generation import Piece

__all__ = ["gather"]


async def gather(pieces: AsyncIterator[Piece], interval: int) -> AsyncIterator[Piece]:
    """Pass pieces on once an answer has at least `interval` tokens to send, and at its end."""
    held: dict[int, Chunk] = {}
    async for piece in pieces:
        if interval == 1:
            yield piece
            continue
        before = held.pop(piece.index, None)
        chunk = piece.chunk if before is None else _join(before, piece.chunk)
        if len(chunk.token_ids) >= interval or chunk.result is not None:
            yield Piece(piece.index, chunk)
        else:
            held[piece.index] = chunk


def _join(first: Chunk, second: Chunk) -> Chunk:
    logprobs = (*(first.logprobs or ()), *(second.logprobs or ()))
    return Chunk(
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        num_accepted=first.num_accepted + second.num_accepted,
        result=second.result,
        pieces=first.pieces + second.pieces,
        method=second.method,
        sample_index=second.sample_index,
        logprobs=logprobs or None,
    )
