"""Messages as clients send them, made into what chat templates expect.

Text parts are joined, null content beside calls becomes empty text, and the arguments of calls,
which travel as JSON text, become objects: templates write them with `tojson`, as transformers'
convention has it. What cannot be shown to a text model is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ...errors import InvalidParameter
from .formats import ToolFormat

__all__ = ["normalise_messages"]

TEXT_TYPES = ("text", "input_text", "output_text")


def normalise_messages(messages: object, format: ToolFormat | None = None) -> list[dict[str, Any]]:
    """Return messages for a template; those of `format` may want their own kind of call ids.

    Raises:
        InvalidParameter: naming the place, as in `messages[2].tool_calls[0].function.arguments`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidParameter(f"messages must be a list, not {type(messages).__name__}")
    id_chars = None if format is None else format.id_chars
    return [_message(f"messages[{index}]", each, id_chars) for index, each in enumerate(messages)]


def _message(where: str, given: object, id_chars: int | None) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidParameter(f"{where} must be an object with role and content")
    # Templates ask whether a key is there, not whether its value is null.
    message = {key: value for key, value in given.items() if value is not None}
    calls = _calls(f"{where}.tool_calls", message.pop("tool_calls", None), id_chars)
    if calls and message.get("role") != "assistant":
        raise InvalidParameter(f"{where}.tool_calls: only the assistant calls tools")
    message["content"] = _content(f"{where}.content", message.get("content"), bool(calls))
    if calls:
        message["tool_calls"] = calls
    if "tool_call_id" in message:
        message["tool_call_id"] = _id(f"{where}.tool_call_id", message["tool_call_id"], id_chars)
    return message


def _content(where: str, content: object, has_calls: bool) -> str:
    if content is None:
        if not has_calls:
            raise InvalidParameter(f"{where} is missing; an empty text is ''")
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidParameter(
            f"{where} must be text or a list of text parts, not {type(content).__name__}"
        )
    return "\n".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise InvalidParameter(f"{where} must be an object with type and text")
    kind = part.get("type")
    if kind not in TEXT_TYPES:
        raise InvalidParameter(
            f"{where}.type {str(kind)[:40]!r} is not supported; only text is: "
            '{"type": "text", "text": ...}'
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidParameter(f"{where}.text must be text, not {type(text).__name__}")
    return text


def _calls(where: str, given: object, id_chars: int | None) -> list[dict[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidParameter(f"{where} must be a list, not {type(given).__name__}")
    return [_call(f"{where}[{index}]", each, id_chars) for index, each in enumerate(given)]


def _call(where: str, given: object, id_chars: int | None) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidParameter(f"{where} must be an object")
    if given.get("type", "function") != "function":
        raise InvalidParameter(f"{where}.type must be 'function'")
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParameter(f"{where}.function must be an object with name and arguments")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidParameter(f"{where}.function.name must be text")
    arguments = _arguments(f"{where}.function.arguments", function.get("arguments"))
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if given.get("id") is not None:
        call["id"] = _id(f"{where}.id", given["id"], id_chars)
    return call


def _arguments(where: str, given: object) -> dict[str, Any]:
    if given is None or given == "":
        return {}  # some clients send this for a function without parameters
    arguments = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"{where} is not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise InvalidParameter(f"{where} must be a JSON object, not {type(arguments).__name__}")
    return dict(arguments)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _id(where: str, given: object, num_chars: int | None) -> str:
    if not isinstance(given, str):
        raise InvalidParameter(f"{where} must be text, not {type(given).__name__}")
    fits = num_chars is None or (len(given) == num_chars and given.isascii() and given.isalnum())
    # Mistral's templates take nine letters and digits. A call and its result keep the same id.
    return (
        given if fits else hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:num_chars]
    )
