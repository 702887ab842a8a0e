"""The constraint that makes an answer tool calls and nothing else, as llguidance's Lark.

Whatever it admits, `parser` reads as whole calls of the tools, each with arguments that the tool's
schema accepts. JSON is written as templates write it in a conversation's past: one space after
colons and commas, no other white space, so that nothing can go on for ever between two values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...constraint import Constraint
from .definitions import Tool, ToolChoice
from .formats import ARGS, ToolFormat

__all__ = ["tool_constraint"]

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tool_constraint(
    format: ToolFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool = True,
    special_tokens: Mapping[str, int] | None = None,
) -> Constraint | None:
    """Write the constraint for a choice; None if the answer may be anything.

    `special_tokens` are the vocabulary's special tokens by their text: a mark among them is asked
    for as that token, which its letters are not. By id, as [TOOL_CALLS] cannot be named in Lark.
    """
    if not choice.forces_calls:
        return None
    if choice.mode == "named":
        tools = [tool for tool in tools if tool.name == choice.name]
    assert tools, "a choice is validated against the tools"
    is_single = choice.mode == "named" or not parallel
    writer = _Writer(format, special_tokens or {})
    rules = ["%llguidance {}", writer.start(is_single)]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        rules.append(f"call_{index}: {writer.call(tool.name, f'args_{index}')}")
        rules.append(f"args_{index}: %json {json.dumps(_arguments(tool))}")
    return Constraint("grammar", "\n".join(rules) + "\n")


class _Writer:
    """Writes one format's rules."""

    def __init__(self, format: ToolFormat, special_tokens: Mapping[str, int]) -> None:
        self._format = format
        self._special_tokens = special_tokens

    def start(self, is_single: bool) -> str:
        opens, closes = self._mark(self._format.opens), self._mark(self._format.closes)
        if self._format.lists:
            more = "" if is_single else ' (", " call)*'
            return f'start: {opens} " "? "[" call{more} "]"'
        if self._format.bare:
            return "start: call"  # Llama's template would refuse two in its next prompt
        if self._format.named:
            return f"start: {opens} call" if is_single else f"start: ({opens} call)+"
        block = f'block: {opens} "\\n" call "\\n" {closes}'
        return f"start: block{'' if is_single else ' (' + _text(chr(10)) + ' block)*'}\n{block}"

    def call(self, name: str, arguments: str) -> str:
        if self._format.named:
            return f"{_text(name)} {self._mark(ARGS)} {arguments}"
        head = f'{{"name": "{name}", "{self._format.arguments_key}": '
        return f'{_text(head)} {arguments} "}}"'

    def _mark(self, mark: str) -> str:
        token_id = self._special_tokens.get(mark)
        return _text(mark) if token_id is None else f"<[{token_id}]>"


def _text(text: str) -> str:
    return json.dumps(text)


def _arguments(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object in any case."""
    schema = {"properties": {}, "additionalProperties": False}
    given = schema if tool.parameters is None else tool.parameters
    # Last, so that a request cannot loosen how its own schema is enforced.
    return {"type": "object", **given, "x-guidance": _SPACING}
