"""From messages to token ids with the model's own template, which has only so much time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidParameter, TemplateError
from ..text import TextCodec
from ..text.time_limit import TimeIsUp, run_within
from .tools import Tool, normalise_messages, prepare_messages, tool_support

__all__ = ["render_messages"]

RESERVED = frozenset({"tools", "xml_tools", "messages", "add_generation_prompt"})


def render_messages(
    codec: TextCodec,
    given: object,
    *,
    seconds: float,
    tools: Sequence[Tool] = (),
    starts_anew: bool = True,
    continues: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Turn messages to token ids.

    `starts_anew` ends them with the head of an answer; `continues` with the last message's text,
    still open. `variables` are further ones that the template knows.

    Raises:
        InvalidParameter, TemplateError: messages or variables that cannot be rendered.
    """
    support = tool_support(codec.chat_source)
    messages = normalise_messages(given, support.format)
    messages = prepare_messages(messages, tools, support)
    extra = dict(variables or {})
    for name in sorted(RESERVED & extra.keys()):
        raise InvalidParameter(f"chat_template_kwargs: {name!r} is a field of its own")
    if tools and support.variable is not None:
        extra[support.variable] = [dict(tool.definition) for tool in tools]
    template = codec.chat_template
    try:
        template.check_variables(extra)
    except TemplateError as error:
        raise InvalidParameter(f"chat_template_kwargs: {error}") from None
    try:
        text = run_within(
            seconds, lambda: template.render(messages, add_generation_prompt=starts_anew, **extra)
        )
    except TimeIsUp:
        raise TemplateError(
            f"the model's chat template ran for more than {seconds:g} s; send fewer or shorter "
            "messages"
        ) from None
    if continues:
        text = _cut_after(text, messages[-1]["content"])
    return codec.encode(text, add_special=False)


def _cut_after(text: str, last: str) -> str:
    """Drop what a template puts behind the last message, so that the model goes on with it."""
    wanted = last.strip()
    place = text.rfind(wanted)
    if place < 0 or not wanted:
        raise TemplateError(
            "the last message cannot be continued: the model's template writes it otherwise"
        )
    return text[: place + len(wanted)]
