"""The endpoints that generate: each reads, checks, prepares, admits; only then does it answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine.results import Bundle
from .asked import is_constrained
from .body import read_fields
from .chat import ChatFields, chat_compiles, prepare_chat
from .chat_answer import ChatAnswer
from .completions import CompletionAnswer, CompletionFields, prepare_completions
from .fields import ignored_fields
from .generation import Generation
from .service import Service, service_of
from .sse import EventStream, until_disconnect

__all__ = ["IGNORED_HEADER", "answer", "chat_completions", "completions"]

IGNORED_HEADER = "X-Forerun-Ignored-Fields"
GRACE_S = 5.0  # beyond a request's time, for a stream to say so


class Answer(Protocol):
    """An answer that can be sent whole or as a stream."""

    async def whole(self) -> dict[str, Any]: ...

    def frames(self) -> Any: ...


async def chat_completions(http: HttpRequest) -> ASGIApp:
    """POST /v1/chat/completions."""
    service = service_of(http)
    given = await read_fields(http, ChatFields)
    service.check(given)
    prepared = await service.prepare(
        http,
        prepare_chat,
        service,
        given,
        http.state.key,
        timeout_s=given.timeout_s,
        compiles=chat_compiles(given),
    )

    def make(generation: Generation) -> Answer:
        return ChatAnswer(service, given, prepared, generation, http.state.request_id)

    return answer(
        http, service, [prepared.bundle], make, given, bool(given.stream), given.timeout_s
    )


async def completions(http: HttpRequest) -> ASGIApp:
    """POST /v1/completions."""
    service = service_of(http)
    given = await read_fields(http, CompletionFields)
    service.check(given)
    bundles = await service.prepare(
        http,
        prepare_completions,
        service,
        given,
        http.state.key,
        timeout_s=given.timeout_s,
        compiles=is_constrained(given),
    )

    def make(generation: Generation) -> Answer:
        return CompletionAnswer(service, given, bundles, generation, http.state.request_id)

    return answer(http, service, bundles, make, given, bool(given.stream), given.timeout_s)


def answer(
    http: HttpRequest,
    service: Service,
    bundles: Sequence[Bundle],
    make: Callable[[Generation], Answer],
    given: BaseModel,
    stream: bool,
    timeout_s: float | None,
    ignored: str | None = None,
) -> ASGIApp:
    """Admit prepared prompts and answer them, whole or as a stream.

    Raises:
        Overloaded, RateLimited: before anything is sent.
    """
    generation = service.open(bundles, http, timeout_s)
    ignored = ignored_fields(given) if ignored is None else ignored
    headers = {IGNORED_HEADER: ignored} if ignored else {}
    made = make(generation)
    if stream:
        end_s = generation.deadline_s + GRACE_S
        return EventStream(made.frames(), service.config.ping_s, headers, generation.close, end_s)
    return _Whole(made, generation, headers)


class _Whole:
    """An ASGI response that waits for the whole answer, unless the client leaves before."""

    def __init__(self, made: Answer, generation: Generation, headers: dict[str, str]) -> None:
        self._made = made
        self._generation = generation
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await until_disconnect(receive, self._made.whole())
        finally:
            self._generation.close()
        if body is None:
            return
        response: Response = JSONResponse(body, headers=self._headers)
        await response(scope, receive, send)
