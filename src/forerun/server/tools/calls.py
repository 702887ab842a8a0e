"""One call in a model's text, one character at a time: its name, and its arguments as written.

Where a call begins and what lies around it is `parser`'s.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto
from typing import Protocol

from .formats import ARGS, CALL_ID, NAME_CHARS
from .jsonscan import WHITESPACE, JsonScanner, Scan

__all__ = ["Call", "JsonCall", "NamedCall"]

ARGUMENTS_KEYS = ("arguments", "parameters")  # whichever the format has, models write the other
BARE_FIRST_KEYS = ("name", "type")


class Call(Protocol):
    """A call that is being read."""

    name: str  # valid once announced

    @property
    def announced(self) -> bool:
        """Whether it is certain that this is a call of a known function."""
        ...

    @property
    def arguments_whole(self) -> bool:
        """Whether the arguments have come to their end."""
        ...

    def feed(self, char: str) -> Scan:
        """Take the next character; MORE, WRONG, or DONE, which implies `announced`."""
        ...

    def take(self) -> str:
        """Return the text of the arguments since the last time."""
        ...


class _Arguments:
    """The arguments' text, which must be a JSON object."""

    def __init__(self) -> None:
        self.begun = False
        self.whole = False
        self._scanner = JsonScanner()
        self._parts: list[str] = []

    def feed(self, char: str) -> Scan:
        if not self.begun and char != "{":
            return Scan.WRONG
        result = self._scanner.feed(char)
        if result is not Scan.WRONG:
            self.begun = True
            self._parts.append(char)
        self.whole = result is Scan.DONE
        return result

    def take(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        return text


class _At(Enum):
    START = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()  # white space before it
    AFTER = auto()
    IN_KEY = auto()
    IN_NAME = auto()
    IN_ARGUMENTS = auto()
    IN_OTHER = auto()


class JsonCall:
    """A call written as `{"name": ..., "arguments": {...}}`, keys in any order, others skipped."""

    def __init__(self, names: Collection[str], *, bare: bool = False) -> None:
        self.name = ""
        self._names = names
        self._bare = bare  # nothing marks it as a call: most JSON objects are none
        self._at = _At.START
        self._scanner = JsonScanner()
        self._string: list[str] = []  # a key or the name, with its quotes
        self._key = ""
        self._is_first_key = False
        self._has_name = False
        self._arguments = _Arguments()

    @property
    def announced(self) -> bool:
        return self._has_name and self._arguments.begun

    @property
    def arguments_whole(self) -> bool:
        return self._arguments.whole

    def take(self) -> str:
        return self._arguments.take()

    def feed(self, char: str) -> Scan:
        if self._at in (_At.IN_KEY, _At.IN_NAME, _At.IN_ARGUMENTS, _At.IN_OTHER):
            return self._inside(char)
        if char in WHITESPACE:
            return Scan.MORE
        if self._at is _At.VALUE:
            return self._begin_value(char)
        return self._punctuation(char)

    def _punctuation(self, char: str) -> Scan:
        at = self._at
        if at is _At.AFTER and char == "}":
            return Scan.DONE if self.announced else Scan.WRONG
        if at in (_At.FIRST_KEY, _At.KEY) and char == '"':
            return self._begin_string(_At.IN_KEY, char)
        following = {
            (_At.START, "{"): _At.FIRST_KEY,
            (_At.COLON, ":"): _At.VALUE,
            (_At.AFTER, ","): _At.KEY,
        }.get((at, char))
        if following is None:
            return Scan.WRONG
        self._at = following
        return Scan.MORE

    def _begin_value(self, char: str) -> Scan:
        if self._key == "name":
            if self._has_name or char != '"':
                return Scan.WRONG
            return self._begin_string(_At.IN_NAME, char)
        if self._key in ARGUMENTS_KEYS:
            if self._arguments.begun:
                return Scan.WRONG
            self._at = _At.IN_ARGUMENTS
        else:
            self._at = _At.IN_OTHER
            self._scanner = JsonScanner()
        return self._inside(char)

    def _begin_string(self, at: _At, char: str) -> Scan:
        self._is_first_key = self._at is _At.FIRST_KEY
        self._at = at
        self._scanner = JsonScanner()
        self._string.clear()
        return self._inside(char)

    def _inside(self, char: str) -> Scan:
        at = self._at
        scanner = self._arguments if at is _At.IN_ARGUMENTS else self._scanner
        result = scanner.feed(char)
        if result is Scan.WRONG:
            return result
        if at in (_At.IN_KEY, _At.IN_NAME):
            self._string.append(char)
        if result is Scan.MORE:
            return result
        return self._end_value(at, char, consumed=result is Scan.DONE)

    def _end_value(self, at: _At, char: str, *, consumed: bool) -> Scan:
        if at is _At.IN_KEY:
            self._key = json.loads("".join(self._string))
            self._at = _At.COLON
            refused = self._bare and self._is_first_key and self._key not in BARE_FIRST_KEYS
            return Scan.WRONG if refused else Scan.MORE
        if at is _At.IN_NAME:
            self.name = json.loads("".join(self._string))
            if self.name not in self._names:
                return Scan.WRONG
            self._has_name = True
        self._at = _At.AFTER
        return Scan.MORE if consumed else self.feed(char)


class NamedCall:
    """A call written as `name[ARGS]{...}`; the mark may be missing, an id may stand before it."""

    def __init__(self, names: Collection[str]) -> None:
        self.name = ""
        self._names = names
        self._letters: list[str] = []
        self._mark = ""  # what has come of a mark
        self._in_id = False
        self._before_arguments = False
        self._arguments = _Arguments()

    @property
    def announced(self) -> bool:
        return self._arguments.begun

    @property
    def arguments_whole(self) -> bool:
        return self._arguments.whole

    def take(self) -> str:
        return self._arguments.take()

    def feed(self, char: str) -> Scan:
        if self._arguments.begun:
            return self._arguments.feed(char)
        if self._mark or (char == "[" and not self._before_arguments):
            return self._in_mark(char)
        if self._in_id:
            return Scan.MORE if char.isalnum() else Scan.WRONG
        if char == "{":
            self.name = "".join(self._letters)
            return self._arguments.feed(char) if self.name in self._names else Scan.WRONG
        if char in WHITESPACE:
            self._before_arguments = True
            return Scan.MORE
        if self._before_arguments or char not in NAME_CHARS:
            return Scan.WRONG
        self._letters.append(char)
        return Scan.MORE

    def _in_mark(self, char: str) -> Scan:
        self._mark += char
        if self._mark == ARGS:
            self._mark, self._in_id, self._before_arguments = "", False, True
        elif self._mark == CALL_ID and not self._in_id:
            self._mark, self._in_id = "", True
        elif not any(mark.startswith(self._mark) for mark in (ARGS, CALL_ID)):
            return Scan.WRONG
        return Scan.MORE
