"""`forerun chat`: lines in, answers out, until Ctrl-D. Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Annotated

import typer

from ..errors import EngineClosed, ForerunError, nearest_name
from .conversation import Conversation
from .loading import open_engine
from .options import EngineOptions, takes_groups
from .sampling_options import SamplingOptions
from .screen import describe_stats, is_terminal, out, printable, say_error, say_note

__all__ = ["chat"]

MAX_TOKENS = 1024  # unless asked for more

HELP = """\
/stats   speed and drafts of the last answer and of the session
/reset   begin a new conversation
/help    this list
/quit    end; so do Ctrl-D, and Ctrl-C twice
Ctrl-C while an answer comes stops that answer; what came of it stays in the conversation."""


@takes_groups
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="The system message.")
    ] = None,
) -> None:
    """Talk with a model. /help lists what else can be typed.

    Answers have at most 1024 tokens unless --max-tokens says otherwise.
    """
    params = sampling.params(max_tokens=MAX_TOKENS)
    with open_engine(engine) as opened:
        _ = opened.codec.chat_template  # without one there is no chat: say so before the first line
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() history and editing)
        if is_terminal(sys.stdin):
            out.print(f"{engine.model}: /help lists commands, Ctrl-D ends.", style="dim")
        _Loop(Conversation(opened, params, system)).run()


class _Loop:
    """Reads lines until the end; a line is a message, or a command with a slash."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._interactive = is_terminal(sys.stdin)
        self._ended = False
        self._commands: Mapping[str, Callable[[], None]] = {
            "/stats": self._show_stats,
            "/reset": self._reset,
            "/help": lambda: out.print(HELP, style="dim"),
            "/quit": self._quit,
        }

    def run(self) -> None:
        num_interrupts = 0
        while not self._ended:
            try:
                line = input("> " if self._interactive else "").strip()
            except EOFError:
                self._end_line()
                return
            except KeyboardInterrupt:
                self._end_line()
                num_interrupts += 1
                if num_interrupts == 2:
                    return
                say_note("Ctrl-C again, Ctrl-D or /quit ends")
                continue
            num_interrupts = 0
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._answer(line)

    def _obey(self, line: str) -> None:
        name = line.split()[0]
        if name in self._commands:
            self._commands[name]()
        else:
            say_error(f"unknown command {name!r}; {nearest_name(name, self._commands)}")

    def _answer(self, line: str) -> None:
        try:
            with closing(self._conversation.ask(line)) as chunks:
                for chunk in chunks:
                    sys.stdout.write(printable(chunk.text))
                    sys.stdout.flush()
            print()
        except KeyboardInterrupt:
            print()
            say_note("stopped; what came so far stays in the conversation")
            return
        except EngineClosed:
            raise
        except ForerunError as error:
            say_error(f"{error}; in a chat, /reset begins a new conversation")
            return
        self._remark()

    def _remark(self) -> None:
        """Say what a reader of the answer could not know: that it was cut, or failed."""
        result = self._conversation.last
        if result is None:
            return
        if result.error is not None:
            if isinstance(result.error, EngineClosed):
                raise result.error
            say_error(str(result.error))
        elif result.finish_reason == "length":
            used = result.stats.num_prompt_tokens + result.stats.num_emitted
            say_note(
                f"cut off after {result.stats.num_emitted} tokens, {used} with the conversation: "
                "raise --max-tokens, or /reset if the context is full"
            )

    def _show_stats(self) -> None:
        conversation = self._conversation
        if conversation.last is not None:
            _print_block("last answer", describe_stats([conversation.last.stats]))
        elif conversation.num_stopped:
            _print_block("last answer", ["stopped, so not counted"])
        if not conversation.finished:
            out.print("no whole answer yet", style="dim")
            return
        count = len(conversation.finished)
        title = f"session, {count} answer{'s' if count > 1 else ''}"
        _print_block(title, describe_stats(conversation.finished))

    def _reset(self) -> None:
        self._conversation.forget()
        out.print("a new conversation", style="dim")

    def _quit(self) -> None:
        self._ended = True

    def _end_line(self) -> None:
        if self._interactive:
            print()


def _print_block(title: str, lines: list[str]) -> None:
    out.print(f"{title}:", style="dim")
    for line in lines:
        out.print(f"  {line}", style="dim", soft_wrap=True)
