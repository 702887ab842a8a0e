"""What the tests of reading share: joined deltas, formats, counted ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from forerun.server.tools import (
    FORMATS,
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    Delta,
    ParsedText,
    ToolCallParser,
    ToolFormat,
    parse_text,
)

HERMES, LLAMA = FORMATS["hermes"], FORMATS["llama"]
MISTRAL, MISTRAL_ARGS = FORMATS["mistral"], FORMATS["mistral_args"]
NAMES = ("f", "get_weather", "get-all")


def parser(format: ToolFormat) -> ToolCallParser:
    counter = itertools.count()
    return ToolCallParser(format, NAMES, new_id=lambda: f"id{next(counter)}")


def read(
    format: ToolFormat, pieces: Iterable[str], truncated: bool = False
) -> tuple[list[Delta], bool]:
    """Return the deltas of a text in pieces, neighbours of one kind joined, and `complete`."""
    reader = parser(format)
    deltas = [delta for piece in pieces for delta in reader.push(piece)]
    deltas += reader.finish(truncated)
    return joined(deltas), reader.complete


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            result[-1] = ContentDelta(last.text + delta.text)
        elif (
            isinstance(delta, ArgumentsDelta)
            and isinstance(last, ArgumentsDelta)
            and delta.index == last.index
        ):
            result[-1] = ArgumentsDelta(delta.index, last.text + delta.text)
        else:
            result.append(delta)
    return result


def whole(format: ToolFormat, text: str, truncated: bool = False) -> ParsedText:
    return parse_text(text, format, NAMES, truncated=truncated)


def calls_of(parsed: ParsedText) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in parsed.calls]


__all__ = [
    "HERMES",
    "LLAMA",
    "MISTRAL",
    "MISTRAL_ARGS",
    "CallStarted",
    "calls_of",
    "joined",
    "parser",
    "read",
    "whole",
]
