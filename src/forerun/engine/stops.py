"""Where a request ends inside a block of verified tokens: a stop, its length, or all that fits.

Nothing here knows drafts: a stop inside an accepted block ends the request exactly there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..types import FinishReason
from .request import Request

__all__ = ["Block", "cut_at_stop"]


@dataclass(frozen=True, slots=True)
class Block:
    """The part of a verified block that a request takes."""

    num_emitted: int
    pieces: tuple[str, ...] | None  # the text of each token; None: the reader makes it
    finish_reason: FinishReason | None
    stopped_by: int | str | None


def cut_at_stop(request: Request, candidates: Sequence[int]) -> Block:
    """Go through a block token by token, and end it exactly where the request ends.

    A stop token is emitted but has no text; a stop string's text is cut before it. What must look
    like something (`Request.grammar`) ends where nothing more can follow.
    """
    detokenizer = request.detokenizer if request.params.stop else None
    pieces: list[str] = []
    reason: FinishReason | None = None
    stopped_by: int | str | None = None
    count = 0
    if request.num_remaining == 0:  # only the prompt was asked about
        return Block(0, None if detokenizer is None else (), FinishReason.LENGTH, None)
    for token in candidates:
        count += 1
        if request.grammar is not None:
            request.grammar.advance([token])
        if token in request.stop_ids:
            pieces.append("")
            reason, stopped_by = FinishReason.STOP, token
            break
        if detokenizer is not None:
            pieces.append(detokenizer.push(token))
            if detokenizer.stopped is not None:
                reason, stopped_by = FinishReason.STOP, detokenizer.stopped
                break
        if request.grammar is not None and request.grammar.must_end:
            reason = FinishReason.STOP
            break
        if count == request.num_remaining:
            reason = FinishReason.LENGTH
            break
    return Block(count, None if detokenizer is None else tuple(pieces), reason, stopped_by)
