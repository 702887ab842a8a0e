"""Where prompts come from: an option, a file, stdin, or a file of many. Knows no engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError, EmptyPrompt, refuse_unknown

__all__ = ["Message", "PromptOptions", "chat_messages"]

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What to answer, and whether the chat template goes around it."""

    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt; - reads it from stdin."),
    ] = None
    prompt_file: Annotated[
        str | None,
        typer.Option("--prompt-file", metavar="FILE", help="The prompt; its last newline is cut."),
    ] = None
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='Many, answered together: a {"prompt": ...} or {"messages": ...} per line. '
            "Prints a line of JSON for each.",
        ),
    ] = None
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="The system message.")
    ] = None
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Use the model's chat template, or continue the text as it is. "
            "Default: --chat where the model has a template.",
        ),
    ] = None

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            ConfigError: no prompt, more than one, or a system message for a raw one.
        """
        names = ("prompt", "prompt_file", "prompts")
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]
        if not given:
            raise ConfigError("no prompt; give --prompt TEXT, --prompt-file FILE or --prompts FILE")
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} exclude each other; give one")
        if self.system is not None and self.chat is False:
            raise ConfigError("--system needs the chat template, which --raw leaves out")

    def read_one(self) -> str:
        """Read the single prompt.

        Raises:
            EmptyPrompt: there is nothing in it.
            ConfigError: its file cannot be read.
        """
        if self.prompt is not None and self.prompt != "-":
            text = self.prompt
        else:
            text = _read_text("-" if self.prompt_file is None else self.prompt_file)
            text = text.removesuffix("\n").removesuffix("\r")
        if not text:
            raise EmptyPrompt("the prompt is empty; give it at least one character")
        return text

    def read_many(self) -> list[str | list[Message]]:
        """Read the prompts of a JSON lines file, in order; errors name the line."""
        assert self.prompts is not None, "asked for only where --prompts was given"
        lines = _read_text(self.prompts).splitlines()
        found = [
            _read_line(f"{self.prompts}:{number}", line)
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
        if not found:
            raise EmptyPrompt(f"{self.prompts} holds no prompts; give one JSON object per line")
        return found


def chat_messages(text: str, system: str | None) -> list[Message]:
    """Put a prompt and its system message into the form that a chat template takes."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _read_text(path: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{'stdin' if path == '-' else path} is not UTF-8 text: byte {error.start} is "
            f"0x{error.object[error.start]:02x}; convert it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{path!r} is no file name: {error}") from None


def _read_line(where: str, line: str) -> str | list[Message]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ConfigError(f'{where} is not an object such as {{"prompt": "Hello"}}')
    refuse_unknown(entry, ["prompt", "messages"], where)
    if len(entry) != 1:
        raise ConfigError(f"{where} needs either prompt or messages")
    if "prompt" in entry:
        prompt = entry["prompt"]
        if not isinstance(prompt, str):
            raise ConfigError(f"{where}: prompt is not text but {type(prompt).__name__}")
        if not prompt:
            raise EmptyPrompt(f"{where}: the prompt is empty; give it at least one character")
        return prompt
    return _check_messages(where, entry["messages"])


def _check_messages(where: str, messages: Any) -> list[Message]:
    # What a message must hold is the template's to say; here only that the engine takes a chat.
    is_chat = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_chat or not messages or not all(isinstance(each, dict) for each in messages):
        raise ConfigError(f"{where}: messages is not a list of objects with role and content")
    return list(messages)
