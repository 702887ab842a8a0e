"""How a command ends: its exit code, and one line on stderr if something went wrong.

0     it did what was asked          130   Ctrl-C
1     a surprise, or no network      141   whoever read its output has gone
2     bad input: see errors.py       FORERUN_DEBUG=1 adds the traceback
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import typer
import typer.main

from ..errors import ForerunError
from .screen import prepare_streams, say_error, show_warnings

__all__ = ["run"]

INTERRUPTED = 130
PIPE_CLOSED = 141
USAGE = 2


def run(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    prepare_streams()
    show_warnings(debug=_debugging())
    try:
        code = _invoke(app, arguments)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return _leave(INTERRUPTED)
    except BrokenPipeError:
        # What is still buffered must not be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _leave(PIPE_CLOSED)
    except Exception as error:  # noqa: BLE001  (the one place where errors become words)
        return _report(error)
    return code


def _invoke(app: typer.Typer, arguments: Sequence[str]) -> int:
    command: Any = typer.main.get_command(app)
    try:
        with command.make_context("forerun", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0


def _leave(code: int) -> int:
    """End at once: an engine that is still loading in its thread would delay or crash the exit."""
    if threading.active_count() == 1:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(error: Exception) -> int:
    if _debugging():
        traceback.print_exception(error)
    if isinstance(error, ForerunError):
        say_error(str(error))
        return error.exit_code
    if hasattr(error, "format_message"):  # typer's; their base class moves between its releases
        say_error(_explain_usage(error))
        return USAGE
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    say_error(f"unexpected {what}; run with FORERUN_DEBUG=1 for the traceback")
    return 1


def _explain_usage(error: Any) -> str:
    """Say in one line what is wrong with a command line, and what was probably meant."""
    context = getattr(error, "ctx", None)
    message = str(error.format_message()).rstrip(".")
    if context is None:
        return message
    option = getattr(error, "option_name", None)
    command = re.match(r"No such command '(.*?)'", message)
    if command:
        message = f"unknown command {command[1]!r}{_hint(command[1], context.command.commands)}"
    elif option and message.startswith("No such option"):
        known = [name for each in context.command.get_params(context) for name in each.opts]
        message = f"unknown option {option}{_hint(option, known)}"
    else:
        message = message[:1].lower() + message[1:]
    return f"{message} (see: {context.command_path} --help)"


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _debugging() -> bool:
    return os.environ.get("FORERUN_DEBUG", "0") not in ("", "0")
