"""Chat completions: from messages and fields to prepared requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from ..constraint import Constraint
from ..engine.results import Bundle
from .asked import constraint_field, is_constrained, read_constraint, read_params
from .failures import Refusal
from .fields import Count, GenerationFields, Objects, Text
from .keys import ApiKey
from .rendering import render_messages
from .service import Service
from .tools import (
    Tool,
    ToolCallParser,
    ToolChoice,
    ToolFormat,
    tool_constraint,
    tool_support,
    validate_tool_choice,
    validate_tools,
)

__all__ = ["ChatFields", "PreparedChat", "chat_compiles", "prepare_chat"]


class ChatFields(GenerationFields):
    """The body of a chat completion."""

    messages: Annotated[Objects, Field(min_length=1)]
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    max_completion_tokens: Count | None = None
    tools: Objects | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Text | None = None


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat completion ready to run, and how to read its answers."""

    bundle: Bundle
    tool_format: ToolFormat | None  # None: the answer is content, whatever it looks like
    tool_names: tuple[str, ...]

    def parser(self) -> ToolCallParser | None:
        """Make a reader for one answer."""
        if self.tool_format is None:
            return None
        return ToolCallParser(self.tool_format, self.tool_names)


def prepare_chat(service: Service, given: ChatFields, key: ApiKey | None) -> PreparedChat:
    """Check everything, render, encode and make the requests. Takes processor time.

    Raises:
        Refusal, ForerunError: whatever is wrong, before anything is started.
    """
    codec = service.engine.codec
    tools = validate_tools(given.tools)
    choice = validate_tool_choice(given.tool_choice, tools)
    support = tool_support(codec.chat_source)
    offered = () if choice.mode == "none" else tools
    constraint = _constraint(service, given, offered, choice, support.format)
    tokens = _render(service, given, offered)
    wants_marks = offered and any(mark in codec.special_tokens for mark in support.format.marks)
    params = read_params(
        given,
        service.doors,
        key,
        max_tokens=_max_tokens(given),
        logprobs=_logprobs(given),
        constraint=constraint,
        **({"skip_special_tokens": False} if wants_marks else {}),
    )
    field = "tools" if choice.forces_calls else constraint_field(given)
    bundle = service.make(tokens, params, "messages", field)
    if given.logprobs:
        service.token_texts  # noqa: B018  (made here, beside the event loop)
    names = tuple(tool.name for tool in offered)
    return PreparedChat(bundle, support.format if offered else None, names)


def chat_compiles(given: ChatFields) -> bool:
    """Say whether something has to be compiled for a request."""
    return is_constrained(given) or given.tool_choice not in (None, "none", "auto")


def _max_tokens(given: ChatFields) -> int | None:
    both = (given.max_completion_tokens, given.max_tokens)
    if None not in both and both[0] != both[1]:
        raise Refusal(
            400,
            f"max_completion_tokens={both[0]} and max_tokens={both[1]} say different things; "
            "send one of them",
            param="max_completion_tokens",
            code="invalid_value",
        )
    name = "max_tokens" if both[0] is None else "max_completion_tokens"
    value = both[1] if both[0] is None else both[0]
    if value is not None and value < 1:
        raise Refusal(400, f"{name}={value} is under 1", param=name, code="invalid_value")
    return value


def _logprobs(given: ChatFields) -> int | None:
    if given.top_logprobs is not None and not given.logprobs:
        raise Refusal(
            400,
            f"top_logprobs={given.top_logprobs} needs logprobs to be true",
            param="top_logprobs",
            code="invalid_value",
        )
    return (given.top_logprobs or 0) if given.logprobs else None


def _constraint(
    service: Service,
    given: ChatFields,
    tools: tuple[Tool, ...],
    choice: ToolChoice,
    format: ToolFormat,
) -> Constraint | None:
    asked = read_constraint(given.response_format, given.structured_outputs)
    if not choice.forces_calls:
        return asked
    if asked is not None:
        raise Refusal(
            400,
            "the answer must be calls (tool_choice) and must be as response_format or "
            "structured_outputs say; send one of them",
            param="tool_choice",
            code="invalid_value",
        )
    return tool_constraint(
        format,
        tools,
        choice,
        given.parallel_tool_calls is not False,
        service.engine.codec.special_tokens,
    )


def _render(service: Service, given: ChatFields, tools: tuple[Tool, ...]) -> list[int]:
    continues = bool(given.continue_final_message)
    if continues and given.add_generation_prompt:
        raise Refusal(
            400,
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
            code="invalid_value",
        )
    return render_messages(
        service.engine.codec,
        given.messages,
        seconds=service.config.template_timeout_s,
        tools=tools,
        starts_anew=not continues and given.add_generation_prompt is not False,
        continues=continues,
        variables=given.chat_template_kwargs,
    )
