"""What clients hear when something is wrong, in the shape that OpenAI's clients read.

Coding assistants match the overflow of the context by code *and* by sentence, so both are the
classic ones. Whatever was not raised on purpose is told as an id, and in full only in the log.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from ..errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineDied,
    ForerunError,
    Overloaded,
    RateLimited,
    RequestError,
    TemplateError,
)

__all__ = ["Refusal", "describe", "refuse_context"]

# "temperature=3 is outside [0, 2]" begins with the name of its parameter; "tools has ..." too.
PARAM = re.compile(r"([a-z][a-z_]{0,40})(?=[=\[:.])|((?:[a-z]+_)+[a-z]+|tools|prompt|messages)\b")


@dataclass(slots=True)
class Refusal(Exception):
    """An answer that is an error, complete with everything that goes over the wire."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def describe(error: BaseException, request_id: str) -> Refusal:
    """Say what an error means to a client."""
    if isinstance(error, Refusal):
        return error
    # What went wrong inside is for the log; a plain ForerunError wraps just that.
    if not isinstance(error, ForerunError) or type(error) is ForerunError:
        return Refusal(
            500,
            f"the server failed; its log says why beside the id {request_id}",
            "internal_error",
            code="internal_error",
        )
    status, message = error.http_status, str(error)
    if isinstance(error, EngineDied):
        message = "the engine has failed; the server's log says why, and it must be started anew"
    if isinstance(error, ContextTooLong):
        return Refusal(400, message, code="context_length_exceeded", param="messages")
    if isinstance(error, RequestError):
        found = PARAM.match(message)
        param = found[0] if found else "messages" if isinstance(error, TemplateError) else None
        return Refusal(status, message, param=param, code="invalid_value")
    if isinstance(error, Overloaded):
        wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        limited = isinstance(error, RateLimited)
        kind, code = ("rate_limit_error", "rate_limit_exceeded") if limited else _BUSY
        return Refusal(status, message, kind, code=code, headers=wait)
    if isinstance(error, DeadlineExceeded):
        return Refusal(status, message, "timeout_error", code="deadline_exceeded")
    if status == 503:
        return Refusal(status, message, *_BUSY[:1], code="unavailable")
    kind = "invalid_request_error" if status < 500 else "internal_error"
    return Refusal(status, message, kind, code=_snake(type(error).__name__))


def refuse_context(limit: int, num_prompt: int, num_asked: int, param: str) -> Refusal:
    """Say that prompt and answer do not fit the context, in the sentence that clients look for."""
    where = "messages" if param == "messages" else "prompt"
    return Refusal(
        400,
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{num_prompt + num_asked} tokens ({num_prompt} in the {where}, {num_asked} in the "
        "completion). Please reduce the length of the messages or completion.",
        param=param,
        code="context_length_exceeded",
    )


_BUSY = ("overloaded_error", "overloaded")


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
