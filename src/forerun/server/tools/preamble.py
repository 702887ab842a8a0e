"""Tools for models whose template knows none: the telling goes into messages, as plain text.

The system message says which tools there are and how to call them; calls and results in the past
are written out as they would have been seen. The words are those that Qwen2.5 and Hermes were
trained on. Results become a user's message, as such templates know no other role for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .definitions import Tool
from .formats import FALLBACK, ToolSupport

__all__ = ["prepare_messages", "render_preamble"]

_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_AFTER = f"""
</tools>

For each function call, return a json object with function name and arguments within \
{FALLBACK.opens}{FALLBACK.closes} XML tags:
{FALLBACK.opens}
{{"name": <function-name>, "arguments": <args-json-object>}}
{FALLBACK.closes}"""


def render_preamble(tools: Sequence[Tool]) -> str:
    """Write the text that tells a model of its tools and of the fallback format."""
    return _BEFORE + "\n".join(_dump(tool.definition) for tool in tools) + _AFTER


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], support: ToolSupport
) -> list[dict[str, Any]]:
    """Return messages, already normalised, as the model's template can render them.

    A template that takes tools gets them untouched, but for past calls that it would leave out.
    Any other gets the preamble, and the past written out; that too when this request has no tools
    but an earlier turn had.
    """
    past = [dict(each) if support.writes_calls else _write_calls(each) for each in messages]
    if support.variable is not None:
        return past
    written: list[dict[str, Any]] = []
    previous = ""
    for message in past:
        role = message.get("role", "")
        if role != "tool":
            written.append(message)
        elif previous == "tool":  # results in a row are one message: templates may insist on turns
            written[-1]["content"] += "\n" + _result(message)
        else:
            written.append({"role": "user", "content": _result(message)})
        previous = role
    return _with_preamble(written, render_preamble(tools), support) if tools else written


def _write_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    written = dict(message)
    calls = written.pop("tool_calls", None)
    if calls:
        blocks = [
            f"{FALLBACK.opens}\n{_dump(_pick(call['function']))}\n{FALLBACK.closes}"
            for call in calls
        ]
        text = written["content"]
        written["content"] = "\n".join([text, *blocks] if text else blocks)
    return written


def _pick(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": function["arguments"]}


def _result(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _with_preamble(
    messages: list[dict[str, Any]], preamble: str, support: ToolSupport
) -> list[dict[str, Any]]:
    host = ("system", "developer") if support.system_role else ("user",)
    if messages and messages[0].get("role") in host:
        first = messages[0]
        # The system's own words come first, as in Qwen's template; a question comes last.
        pieces = (
            [first["content"], preamble] if support.system_role else [preamble, first["content"]]
        )
        joined = "\n\n".join(piece for piece in pieces if piece)
        return [{**first, "content": joined}, *messages[1:]]
    return [{"role": host[0], "content": preamble}, *messages]


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
