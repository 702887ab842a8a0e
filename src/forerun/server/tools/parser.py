"""From a model's text to tool calls, as it streams: content passes, calls are told apart.

The laws. The deltas do not depend on how the text is cut into pieces. Arguments are the model's own
text, never written anew. What is no whole, well-formed call of a known function is content, with
its marks, to the last character; only white space that fills the room beside calls is dropped. A
call that has been announced stays: if it then goes wrong, its arguments are what came up to the
next mark, and `complete` is false. Every character is looked at a fixed number of times.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .calls import Call, JsonCall, NamedCall
from .formats import NAME_CHARS, ToolFormat
from .jsonscan import WHITESPACE, Scan

__all__ = [
    "ArgumentsDelta",
    "CallStarted",
    "ContentDelta",
    "Delta",
    "ParsedCall",
    "ParsedText",
    "ToolCallParser",
    "new_call_id",
    "parse_text",
]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call has begun; its arguments follow."""

    index: int  # of the call in the answer, from 0
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments, as the model wrote them."""

    index: int
    text: str


Delta = ContentDelta | CallStarted | ArgumentsDelta


def new_call_id() -> str:
    """Make up an id for a call."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser:
    """Read one answer: `push` its text as it comes, then `finish`."""

    def __init__(
        self,
        format: ToolFormat,
        tool_names: Collection[str],
        *,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._format = format
        self._names = frozenset(tool_names)
        self._new_id = new_id
        self._step = self._text  # what the next character means
        self._num_matched = 0  # characters of the mark that is expected
        self._gap: list[str] = []  # white space: content if content follows, else dropped
        self._has_text = False  # content since the last call
        self._raw: list[str] = []  # what is content if no call comes of it
        self._call: Call | None = None
        self._is_announced = False  # the call, by a delta
        self._in_list = False
        self._deltas: list[Delta] = []
        self._run: list[str] = []  # text for one delta
        self._run_index: int | None = None  # of the call that it is for; None: content
        self._num_calls = 0
        self._complete = True
        self._finished = False

    @property
    def num_calls(self) -> int:
        """How many calls were announced."""
        return self._num_calls

    @property
    def complete(self) -> bool:
        """Whether all calls that were announced are whole and none was cut; after `finish`."""
        return self._complete

    def push(self, text: str) -> list[Delta]:
        """Take more text and return what has become certain."""
        assert not self._finished, "text was pushed after finish()"
        for char in text:
            self._step(char)
        return self._flush()

    def finish(self, truncated: bool) -> list[Delta]:
        """Return the rest; `truncated`: the text was cut, not ended by the model."""
        assert not self._finished, "finish() was called twice"
        self._finished = True
        if self._step == self._text:
            self._content(self._format.opens[: self._num_matched])
        elif self._step == self._broken:
            self._arguments(self._end_mark[: self._num_matched])
        elif self._step == self._in_call and self._is_announced:
            self._complete = False
        elif self._step not in (self._closing, self._between):  # where the calls are whole
            self._content("".join(self._raw))
        if truncated and self._step != self._text:
            self._complete = False  # there might have been another call
        if not self._num_calls:
            self._emit(None, "".join(self._gap))
        return self._flush()

    # Outside of blocks

    def _text(self, char: str) -> None:
        mark, matched = self._format.opens, self._num_matched
        if char == mark[matched]:
            self._num_matched += 1
            if self._num_matched == len(mark):
                self._open_block()
            return
        if matched:
            self._num_matched = 0
            self._content(mark[:matched])
            self._text(char)  # once: nothing is matched now
        elif char == "{" and self._format.bare and not self._has_text:
            self._raw = []
            self._in_list = False
            self._begin_call(JsonCall(self._names, bare=True), char)
        else:
            self._content(char)

    def _content(self, text: str) -> None:
        if self._has_text:
            self._emit(None, text)
        elif all(char in self._format.filler for char in text):
            self._gap.append(text)
        else:
            self._has_text = True
            self._emit(None, "".join(self._gap) + text)
            self._gap.clear()

    # Inside a block

    def _open_block(self) -> None:
        self._num_matched = 0
        self._raw = [self._format.opens]
        self._in_list = False
        self._step = self._opened

    def _opened(self, char: str) -> None:
        if char == "[" and not self._in_list:
            self._raw.append(char)
            self._in_list = True
        elif char in WHITESPACE:
            self._raw.append(char)
        elif char == "{":
            self._begin_call(JsonCall(self._names), char)
        elif self._format.named and not self._in_list and char in NAME_CHARS:
            self._begin_call(NamedCall(self._names), char)
        else:
            self._no_call(char)

    def _begin_call(self, call: Call, char: str) -> None:
        self._call = call
        self._is_announced = False
        self._step = self._in_call
        self._in_call(char)

    def _in_call(self, char: str) -> None:
        call = self._call
        assert call is not None
        result = call.feed(char)
        if result is Scan.WRONG:
            self._wrong(call, char)
            return
        if not self._is_announced:
            self._raw.append(char)
            if call.announced:
                self._announce(call)
        if self._is_announced:
            self._arguments(call.take())
        if result is Scan.DONE:
            self._end_call(call)

    def _announce(self, call: Call) -> None:
        self._is_announced = True
        self._raw = []
        self._gap.clear()
        self._has_text = False
        self._cut_run()
        self._deltas.append(CallStarted(self._num_calls, self._new_id(), call.name))
        self._num_calls += 1

    def _end_call(self, call: Call) -> None:
        self._call = None
        if self._in_list:
            self._step = self._between
        else:
            self._step = self._closing if self._format.closes else self._text

    def _wrong(self, call: Call, char: str) -> None:
        if not self._is_announced:
            self._no_call(char)
            return
        self._complete = False
        if call.arguments_whole:
            self._end_call(call)
        else:
            self._step = self._broken
        self._step(char)

    def _no_call(self, char: str) -> None:
        """Give up: what was held is content, and the character may begin something new."""
        self._content("".join(self._raw))
        self._raw = []
        self._step = self._text
        self._text(char)

    @property
    def _end_mark(self) -> str:
        return self._format.closes or self._format.opens

    def _broken(self, char: str) -> None:
        mark, matched = self._end_mark, self._num_matched
        if char == mark[matched]:
            self._num_matched += 1
            if self._num_matched == len(mark):
                self._num_matched = 0
                self._step = self._text
                if not self._format.closes:
                    self._open_block()
        elif matched:
            self._num_matched = 0
            self._arguments(mark[:matched])
            self._broken(char)  # once: nothing is matched now
        else:
            self._arguments(char)

    def _between(self, char: str) -> None:
        if char == "]":
            self._raw = []
            self._step = self._closing if self._format.closes else self._text
        elif char in WHITESPACE:
            self._raw.append(char)
        elif char == ",":
            self._raw.append(char)
            self._step = self._opened
        else:
            self._no_call(char)

    def _closing(self, char: str) -> None:
        mark, matched = self._format.closes, self._num_matched
        if char == mark[matched]:
            self._num_matched += 1
            if self._num_matched == len(mark):
                self._num_matched = 0
                self._raw = []
                self._step = self._text
        elif not matched and char in WHITESPACE:
            self._raw.append(char)
        else:  # the mark is missing; the next block may begin as it does
            self._num_matched = 0
            held = "".join(self._raw) + mark[:matched] + char
            self._raw = []
            self._step = self._text
            for each in held:
                self._step(each)

    # What goes out

    def _arguments(self, text: str) -> None:
        self._emit(self._num_calls - 1, text)

    def _emit(self, index: int | None, text: str) -> None:
        if index != self._run_index:
            self._cut_run()
            self._run_index = index
        self._run.append(text)

    def _cut_run(self) -> None:
        text = "".join(self._run)
        self._run.clear()
        if text:
            index = self._run_index
            self._deltas.append(
                ContentDelta(text) if index is None else ArgumentsDelta(index, text)
            )

    def _flush(self) -> list[Delta]:
        self._cut_run()
        deltas, self._deltas = self._deltas, []
        return deltas


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call, as it is answered."""

    call_id: str
    name: str
    arguments: str  # JSON text, as written; broken JSON only if the whole is not complete


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A whole answer, read."""

    content: str | None  # None: there is nothing but calls
    calls: tuple[ParsedCall, ...]
    complete: bool


def parse_text(
    text: str,
    format: ToolFormat,
    tool_names: Collection[str],
    *,
    truncated: bool = False,
    new_id: Callable[[], str] = new_call_id,
) -> ParsedText:
    """Read an answer that has come whole."""
    parser = ToolCallParser(format, tool_names, new_id=new_id)
    deltas = [*parser.push(text), *parser.finish(truncated)]
    content = "".join(each.text for each in deltas if isinstance(each, ContentDelta))
    arguments: list[list[str]] = [[] for _ in range(parser.num_calls)]
    for each in deltas:
        if isinstance(each, ArgumentsDelta):
            arguments[each.index].append(each.text)
    calls = tuple(
        ParsedCall(each.call_id, each.name, "".join(arguments[each.index]))
        for each in deltas
        if isinstance(each, CallStarted)
    )
    return ParsedText(content if content or not calls else None, calls, parser.complete)
