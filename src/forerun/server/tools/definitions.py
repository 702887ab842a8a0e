"""What a request says of its tools: their definitions and whether they must be called, checked.

Whether a tool's schema can be enforced turns out when it is compiled; here it need only be an
object's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import InvalidParameter, nearest_name

__all__ = ["Tool", "ToolChoice", "validate_tool_choice", "validate_tools"]

MAX_TOOLS = 128
MAX_PARAMETERS_CHARS = 100_000  # of one tool's schema, as JSON
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call."""

    name: str
    description: str | None
    parameters: Mapping[str, Any] | None  # a JSON schema; None: the function takes nothing
    definition: Mapping[str, Any]  # as the request has it, without nulls: what templates are given


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer must be calls."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None  # named: of the one function to call

    @property
    def forces_calls(self) -> bool:
        """Whether the answer may be nothing but calls."""
        return self.mode in ("required", "named")


def validate_tools(tools: object) -> tuple[Tool, ...]:
    """Check a request's `tools`; absent, null and an empty list are no tools.

    Raises:
        InvalidParameter: naming the place, as in `tools[0].function.name`.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InvalidParameter(f"tools must be a list, not {_kind(tools)}")
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter(f"tools has {len(tools)} entries, the limit is {MAX_TOOLS}")
    checked: dict[str, Tool] = {}
    for index, each in enumerate(tools):
        tool = _tool(f"tools[{index}]", each)
        if tool.name in checked:
            raise InvalidParameter(
                f"tools[{index}].function.name {tool.name!r} is taken by another tool; "
                "names must differ"
            )
        checked[tool.name] = tool
    return tuple(checked.values())


def validate_tool_choice(choice: object, tools: Sequence[Tool]) -> ToolChoice:
    """Check a request's `tool_choice` against its tools; absent: auto, or none without tools."""
    if choice is None:
        return ToolChoice("auto" if tools else "none")
    if choice == "none" or (choice == "auto" and not tools):
        return ToolChoice("none")
    if choice == "auto":
        return ToolChoice("auto")
    if choice == "required":
        if not tools:
            raise InvalidParameter("tool_choice is 'required', but the request has no tools")
        return ToolChoice("required")
    if isinstance(choice, str):
        raise InvalidParameter(
            f"tool_choice {_shown(choice)} is unknown; {nearest_name(choice[:64], MODES)}, "
            'or {"type": "function", "function": {"name": ...}}'
        )
    return ToolChoice("named", _named(choice, tools))


def _named(choice: object, tools: Sequence[Tool]) -> str:
    entry = _object("tool_choice", choice)
    _check_type("tool_choice", entry)
    name = _object("tool_choice.function", entry.get("function")).get("name")
    names = [tool.name for tool in tools]
    if not isinstance(name, str):
        raise InvalidParameter(f"tool_choice.function.name must be text, not {_kind(name)}")
    if not names:
        raise InvalidParameter("tool_choice names a function, but the request has no tools")
    if name not in names:
        raise InvalidParameter(
            f"tool_choice.function.name {_shown(name)} is none of the tools; "
            f"{nearest_name(name[:64], names)}"
        )
    return name


def _tool(where: str, given: object) -> Tool:
    entry = _object(where, given)
    _check_type(where, entry)
    function = _object(f"{where}.function", entry.get("function"))
    name = function.get("name")
    if not isinstance(name, str):
        raise InvalidParameter(f"{where}.function.name must be text, not {_kind(name)}")
    if not _NAME.fullmatch(name):
        raise InvalidParameter(
            f"{where}.function.name {_shown(name)} must be 1 to 64 of the characters "
            "a-z, A-Z, 0-9, _ and -"
        )
    description = function.get("description")
    if not (description is None or isinstance(description, str)):
        raise InvalidParameter(
            f"{where}.function.description must be text, not {_kind(description)}"
        )
    strict = function.get("strict")
    if not (strict is None or isinstance(strict, bool)):
        raise InvalidParameter(f"{where}.function.strict must be true or false")
    parameters = _parameters(f"{where}.function.parameters", function.get("parameters"))
    bare = {key: value for key, value in function.items() if value is not None}
    return Tool(name, description, parameters, {**entry, "function": bare})


def _parameters(where: str, given: object) -> Mapping[str, Any] | None:
    if given is None:
        return None
    schema = _object(where, given)
    kind = schema.get("type", "object")
    if kind != "object":
        raise InvalidParameter(
            f"{where}.type must be 'object', as arguments are one; got {_shown(kind)}"
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise InvalidParameter(f"{where}.properties must be an object, not {_kind(properties)}")
    for name, each in properties.items():
        if not isinstance(each, Mapping | bool):
            raise InvalidParameter(
                f"{where}.properties[{_shown(name)}] must be a schema, not {_kind(each)}"
            )
    _check_size(where, schema)
    return schema


def _check_size(where: str, schema: Mapping[str, Any]) -> None:
    try:
        num_chars = len(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(f"{where} is no JSON, or too deep: {error}") from error
    if num_chars > MAX_PARAMETERS_CHARS:
        raise InvalidParameter(
            f"{where} has {num_chars} characters, the limit is {MAX_PARAMETERS_CHARS}"
        )


def _object(where: str, given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidParameter(f"{where} must be an object, not {_kind(given)}")
    return given


def _check_type(where: str, entry: Mapping[str, Any]) -> None:
    if entry.get("type") != "function":
        raise InvalidParameter(f"{where}.type must be 'function', not {_shown(entry.get('type'))}")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
