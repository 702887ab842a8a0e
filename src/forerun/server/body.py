"""From a request's bytes to checked fields: JSON as the standard has it, then the fields' types.

Python's parser takes more than JSON: NaN, numbers of any length, nesting until the stack ends.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from .failures import Refusal

__all__ = ["as_fields", "read_fields", "read_json"]

Fields = TypeVar("Fields", bound=BaseModel)
MAX_DEPTH = 64
MAX_CONTAINERS = 100_000  # objects and arrays: parsing a million holds up everybody
MAX_SHOWN_CHARS = 80


async def read_fields(request: Request, model: type[Fields]) -> Fields:
    """Read a request's JSON object as `model`.

    Raises:
        Refusal: 400 with the name of the field, 413, 415.
    """
    given = await read_json(request)
    if not isinstance(given, dict):
        raise Refusal(
            400, f"the body is a JSON {_kind(given)}; an object is needed", code="invalid_json"
        )
    return as_fields(given, model)


def as_fields(given: dict[str, Any], model: type[Fields]) -> Fields:
    """Check fields by type; a wrong one is a `Refusal` that names it."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _explain(error) from None


async def read_json(request: Request) -> Any:
    """Read a request's body as JSON."""
    # None is refused too: a page elsewhere may send a body without a type, and nobody asks us.
    content_type = request.headers.get("content-type", "none")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise Refusal(
            415,
            f"the content type is {content_type[:MAX_SHOWN_CHARS]!r}; application/json is needed",
            code="unsupported_media_type",
        )
    body = await request.body()
    try:
        text = body.decode("utf-8")
        _check_width(text)
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        if "\\u" in text:
            _refuse_half_characters(value)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # UnicodeDecodeError and numbers of too many digits too
        raise Refusal(400, f"the body is no JSON: {_shorten(error)}", code="invalid_json") from None
    if _depth_exceeds(value, MAX_DEPTH):
        raise _too_deep()
    return value


# Ends with the text too, so that every quote begins a match and no text is gone over twice.
_STRING = re.compile(r'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)


def _check_width(text: str) -> None:
    """Refuse a text of very many objects and arrays, before any is made."""
    num = text.count("[") + text.count("{")
    if num <= MAX_CONTAINERS:
        return
    bare = _STRING.sub("", text)  # what stands in strings is no structure
    num = bare.count("[") + bare.count("{")
    if num > MAX_CONTAINERS:
        raise ValueError(f"{num} objects and arrays; {MAX_CONTAINERS} are the most")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is too big a number")
    return value


def _refuse_half_characters(value: object) -> None:
    """Refuse an escaped half of a surrogate pair: no text can hold it, ours neither."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"U+{ord(error.object[error.start]):04X} is half of a surrogate pair"
        ) from None


def _too_deep() -> Refusal:
    return Refusal(400, f"the body nests deeper than {MAX_DEPTH}", code="invalid_json")


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _explain(error: ValidationError) -> Refusal:
    """Put the first thing that is wrong into a sentence that names the field and the value."""
    # Of a union's members the one that came furthest tells best what is wrong.
    found = error.errors(include_url=False)
    deepest = max(len(each["loc"]) for each in found)
    told = [each for each in found if not str(each["type"]).endswith("_type")] or found
    first = max(told, key=lambda each: len(each["loc"]) == deepest)
    path = _path(first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        text = f"{path} is missing"
    else:
        text = f"{path}={_shorten(first.get('input'))}: {message}"
    return Refusal(400, text, param=path or None, code="invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    """messages, 0, content -> messages[0].content; names of union members are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_MEMBERS:
            path += f".{part}" if path else part
    return path


_UNION_MEMBERS = frozenset({"str", "int", "float", "bool", "dict", "list", "constrained"})


def _kind(value: object) -> str:
    kinds = {list: "array", str: "string", int: "number", float: "number", bool: "boolean"}
    return kinds.get(type(value), "null")


def _shorten(value: object) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
