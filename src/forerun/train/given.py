"""Prompts and conversations that the user gives: JSON lines, checked one by one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ForerunError
from ..text import TextCodec
from .prompts import Prompt

__all__ = ["GivenFile", "check_given", "given_prompts", "read_given"]


@dataclass(frozen=True, slots=True)
class Given:
    """One line of the file."""

    line: int  # its number, from 1
    text: str  # "" where it is a conversation
    messages: tuple[Mapping[str, Any], ...]
    topic: str


@dataclass(frozen=True, slots=True)
class GivenFile:
    """A file of prompts, read whole."""

    path: Path
    digest: str  # of its bytes: rows that were made of another file are not gone on with
    lines: tuple[Given, ...]


def read_given(path: Path) -> GivenFile:
    """Read JSON lines with "prompt" (a text) or "messages" (a conversation).

    A "category" or "topic" is kept. Empty lines are passed over.

    Raises:
        ConfigError: no such file, nothing in it, or a line that is neither, with its number.
    """
    try:
        data = path.read_bytes()
        lines = data.decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give a file of JSON lines") from None
    given = tuple(
        _read_line(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()
    )
    if not given:
        raise ConfigError(f'{path} is empty; give JSON lines with "prompt" or "messages"')
    return GivenFile(path, hashlib.sha256(data).hexdigest(), given)


def check_given(codec: TextCodec, file: GivenFile) -> None:
    """Refuse what the model cannot be asked, before hours are spent on the lines before it.

    Raises:
        ConfigError: a conversation that the chat template refuses, or that there is none for, or
            text that is no valid Unicode, with the number of the line.
    """
    for given in file.lines:
        messages = _messages(codec, given)
        try:
            text = codec.chat_template.render(messages) if messages else given.text
            text.encode()
        except (ForerunError, UnicodeEncodeError) as error:
            raise ConfigError(f"{file.path}, line {given.line}: {error}") from error


def given_prompts(codec: TextCodec, file: GivenFile, ids: Sequence[int]) -> list[Prompt]:
    """Make the prompts of these entries, counted from 0 without empty lines.

    With a chat template a "prompt" is what a user says, without one it is plain text.
    """
    return [_make(codec, file.lines[id], id) for id in ids if id < len(file.lines)]


def _make(codec: TextCodec, given: Given, row_id: int) -> Prompt:
    messages = _messages(codec, given)
    ids = codec.encode_chat(messages) if messages else codec.encode(given.text)
    content = str(messages[-1].get("content")) if messages else given.text
    return Prompt(row_id, tuple(ids), content, messages, given.topic, "given")


def _messages(codec: TextCodec, given: Given) -> tuple[Mapping[str, Any], ...]:
    if given.messages or not codec.chat_source:
        return given.messages
    return ({"role": "user", "content": given.text},)


def _read_line(path: Path, number: int, line: str) -> Given:
    where = f"{path}, line {number}"
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from None
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ConfigError(f'{where}: expected an object with either "prompt" or "messages"')
    topic = str(entry.get("topic", entry.get("category", "given")))
    if "messages" in entry:
        return Given(number, "", _conversation(where, entry["messages"]), topic)
    text = entry["prompt"]
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f'{where}: "prompt" is {text!r}, not a text with something in it')
    return Given(number, text, (), topic)


def _conversation(where: str, messages: object) -> tuple[Mapping[str, Any], ...]:
    """Check a conversation, and cut it after the user's last words: the target answers them."""
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise ConfigError(f'{where}: "messages" is not a list of objects with role and content')
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise ConfigError(f"{where}: messages[{index}] has no role or no content")
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ConfigError(
            f"{where}: nobody but the assistant speaks, so there is nothing to answer"
        )
    return tuple(messages)
