"""What a stream says when something goes wrong after it has begun: an error, never silence."""

from __future__ import annotations

import logging

from ..errors import ForerunError
from .failures import Refusal, describe
from .sse import frame

__all__ = ["error_frame"]

logger = logging.getLogger(__name__)


def error_frame(error: Exception, request_id: str, padding: int) -> bytes:
    """Write an error as a chunk, which OpenAI's clients raise."""
    if not isinstance(error, ForerunError | Refusal):
        logger.error("request %s failed in its stream", request_id, exc_info=error)
    return frame(describe(error, request_id).body(), padding)
