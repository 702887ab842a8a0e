"""Responses: OpenAI's newer endpoint, without state: an input becomes a conversation.

Nothing is stored, so `previous_response_id` cannot be obeyed and is refused; clients that send the
whole conversation each time (as coding agents do) lack nothing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from ..errors import InvalidParameter, RequestError
from ..types import FinishReason
from .body import as_fields, read_fields
from .chat import ChatFields, PreparedChat, chat_compiles, prepare_chat
from .failures import Refusal, describe
from .fields import Count, Loose, Number, Objects, ShortText, Speculative, ignored_fields
from .gathering import gather
from .generation import Generation
from .response_items import Items
from .routes import answer
from .service import Service, service_of
from .sse import frame
from .tally import metrics_of

__all__ = ["ResponseFields", "responses"]


class TextFormat(Loose):
    """What the answer must look like, in the words of this endpoint."""

    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class TextOptions(Loose):
    """How text is to be."""

    format: TextFormat | None = None


class ResponseFields(Loose):
    """The body of a response."""

    model: ShortText | None = None
    input: StrictStr | Annotated[Objects, Field(min_length=1)]
    instructions: StrictStr | None = None
    max_output_tokens: Count | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: StrictBool | None = None
    tools: Objects | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    previous_response_id: StrictStr | None = None
    background: StrictBool | None = None
    metadata: dict[str, Any] | None = None
    store: StrictBool | None = None
    user: ShortText | None = None
    timeout_s: Annotated[float, Field(strict=True, gt=0, le=86400)] | None = None
    speculative: Speculative | None = None


async def responses(http: HttpRequest) -> ASGIApp:
    """POST /v1/responses."""
    service = service_of(http)
    given = await read_fields(http, ResponseFields)
    for name in ("previous_response_id", "background"):
        if getattr(given, name):
            raise Refusal(
                400,
                f"{name} needs a server that keeps responses; send the whole conversation",
                param=name,
                code="unsupported_parameter",
            )
    try:
        chat = as_fields(_as_chat(given), ChatFields)
        if (chat.n or 1) > 1:
            raise Refusal(
                400,
                f"n={chat.n} is not supported; a response is one answer",
                param="n",
                code="unsupported_parameter",
            )
        service.check(chat)
        prepared = await service.prepare(
            http,
            prepare_chat,
            service,
            chat,
            http.state.key,
            timeout_s=chat.timeout_s,
            compiles=chat_compiles(chat),
        )
    except (Refusal, RequestError) as error:
        raise _rename(describe(error, http.state.request_id), given) from None

    def make(generation: Generation) -> _Answer:
        return _Answer(service, given, prepared, generation, http.state.request_id)

    extra = given.model_extra or {}
    own = [name for name in _OWN_EXTRAS if extra.get(name) is not None]
    named = {*ignored_fields(chat).split(", "), *own, *(["user"] if given.user else [])}
    ignored = ", ".join(sorted(name for name in named if name))
    stream, bundles = bool(given.stream), [prepared.bundle]
    return answer(http, service, bundles, make, chat, stream, given.timeout_s, ignored)


def _rename(refusal: Refusal, given: ResponseFields) -> Refusal:
    """Name a field as it is called here."""
    names = [("messages", "input"), ("max_completion_tokens", "max_output_tokens")]
    if given.text is not None:
        names.append(("response_format", "text"))
    for theirs, ours in names:
        if refusal.param is not None and refusal.param.startswith(theirs):
            refusal.param = ours + refusal.param.removeprefix(theirs)
            refusal.message = refusal.message.replace(theirs, ours)
    return refusal


def _as_chat(given: ResponseFields) -> dict[str, Any]:
    """Say the same as a chat completion."""
    extra = dict(given.model_extra or {})
    chat: dict[str, Any] = {
        **{name: value for name, value in extra.items() if name not in _OWN_EXTRAS},
        "model": given.model,
        "messages": _messages(given),
        "max_completion_tokens": given.max_output_tokens,
        "temperature": given.temperature,
        "top_p": given.top_p,
        "tools": None if given.tools is None else [_tool(each) for each in given.tools],
        "tool_choice": _tool_choice(given.tool_choice),
        "parallel_tool_calls": given.parallel_tool_calls,
        "timeout_s": given.timeout_s,
        "speculative": None if given.speculative is None else given.speculative.model_dump(),
    }
    wanted = given.text.format if given.text is not None else None
    if wanted is not None:
        chat["response_format"] = {"type": wanted.type}
        if wanted.type == "json_schema":
            chat["response_format"]["json_schema"] = {"schema": wanted.schema_}
    return chat


# Fields of this endpoint that say nothing about sampling.
_OWN_EXTRAS = frozenset(
    {"include", "reasoning", "truncation", "prompt_cache_key", "safety_identifier", "service_tier"}
    | {"max_tool_calls", "prompt", "conversation", "client_metadata", "messages", "top_logprobs"}
)


def _messages(given: ResponseFields) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": given.instructions}] if given.instructions else []
    if isinstance(given.input, str):
        return [*first, {"role": "user", "content": given.input}]
    messages: list[dict[str, Any]] = list(first)
    for place, item in enumerate(given.input):
        _add_item(messages, item, f"input[{place}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            messages.append(
                {
                    "role": "system" if role == "developer" else role,
                    "content": _content(item.get("content"), where),
                }
            )
        case "function_call":
            call = {
                "id": item.get("call_id") or item.get("id") or "call_0",
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            last = messages[-1] if messages else {}
            if last.get("role") == "assistant" and last.get("tool_calls"):
                last["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        case "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else _content(output, where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        case "reasoning":
            return  # another model's thoughts are not for this one
        case other:
            raise InvalidParameter(f"{where}.type={str(other)[:64]!r} is not supported here")


def _content(given: Any, where: str) -> Any:
    """Turn this endpoint's parts to chat's."""
    if not isinstance(given, list):
        return given
    parts = []
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text"):
            raise InvalidParameter(f"{where}.content: a part of type {kind!r}; only text is taken")
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "function" or "function" in given:
        return given
    function = {key: value for key, value in given.items() if key != "type"}
    return {"type": "function", "function": function}


def _tool_choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function" and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    return given


class _Answer:
    """One response on its way out."""

    def __init__(
        self,
        service: Service,
        given: ResponseFields,
        prepared: PreparedChat,
        generation: Generation,
        request_id: str,
    ) -> None:
        self._service = service
        self._given = given
        self._prepared = prepared
        self._generation = generation
        self._request_id = request_id
        self._id = f"resp_{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._items = Items(prepared.parser())

    async def whole(self) -> dict[str, Any]:
        async for piece in self._generation.pieces():
            self._items.read(piece.chunk)
        return self._response()

    async def frames(self) -> AsyncIterator[bytes]:
        """Write the events of a response; the last one holds it whole."""
        number = 0

        def event(kind: str, **data: Any) -> bytes:
            nonlocal number
            number += 1
            body = {"type": kind, "sequence_number": number - 1, **data}
            return frame(body, self._service.config.stream_padding, event=kind)

        try:
            yield event("response.created", response=self._response())
            yield event("response.in_progress", response=self._response())
            interval = self._service.config.stream_interval
            async for piece in gather(self._generation.pieces(), interval):
                for kind, data in self._items.read(piece.chunk):
                    yield event(kind, **data)
            response = self._response()
            ending = "completed" if response["status"] == "completed" else "incomplete"
            yield event(f"response.{ending}", response=response)
        except Exception as error:  # noqa: BLE001  (told in the stream, which has begun)
            told = describe(error, self._request_id)
            failed = {**self._response(), "status": "failed"}
            failed["error"] = {"code": told.code or "server_error", "message": told.message}
            yield event("error", code=told.code, message=told.message, param=told.param)
            yield event("response.failed", response=failed)

    def _response(self) -> dict[str, Any]:
        result = self._items.result
        cut = result is not None and result.finish_reason is FinishReason.LENGTH
        status = "in_progress" if result is None else "incomplete" if cut else "completed"
        request = self._prepared.bundle.requests[0]
        given = self._given
        body: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "model": given.model or self._service.config.model_name,
            "output": self._items.whole(),
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if given.temperature is None else given.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": given.tool_choice or "auto",
            "tools": given.tools or [],
            "top_p": 1.0 if given.top_p is None else given.top_p,
            "truncation": "disabled",
            "metadata": given.metadata or {},
            "usage": None,
        }
        if result is not None:
            num_output = len(result.token_ids)
            body["usage"] = {
                "input_tokens": request.num_prompt,
                "input_tokens_details": {"cached_tokens": result.stats.num_cached_tokens},
                "output_tokens": num_output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": request.num_prompt + num_output,
            }
            body["metrics"] = metrics_of(result.stats, self._service.max_draft)
        return body
