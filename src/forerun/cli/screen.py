"""What a person sees: words for counts, lines on stderr, text made safe for a terminal.

stdout carries answers and tables; errors, warnings and progress go to stderr.
"""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from ..engine.stats import RequestStats

__all__ = [
    "describe_stats",
    "err",
    "is_terminal",
    "out",
    "prepare_streams",
    "printable",
    "say_error",
    "say_note",
    "show_warnings",
    "spinner",
]

out = Console(highlight=False, markup=False)
err = Console(stderr=True, highlight=False, markup=False)

# A model's text may hold escape sequences: they are for the terminal's owner alone.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
MAX_POSITIONS_SHOWN = 8


def is_terminal(stream: Any) -> bool:
    """Say whether a person reads or writes this stream."""
    return bool(stream.isatty())


def printable(text: str) -> str:
    """Drop the control characters that a terminal would obey."""
    return text.translate(_CONTROLS)


def prepare_streams() -> None:
    """Escape what the streams' encoding lacks: an answer in another script is no reason to stop."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say_error(message: str) -> None:
    """Print one line `error: ...` on stderr, whatever the message holds."""
    _say("error", "bold red", message)


def say_note(message: str) -> None:
    """Print one line `note: ...` on stderr."""
    _say("note", "dim", message)


def show_warnings(*, debug: bool) -> None:
    """Print the library's warnings, and Python's, in one line each on stderr."""
    logger = logging.getLogger("forerun")
    if not any(isinstance(each, _StderrHandler) for each in logger.handlers):
        logger.addHandler(_StderrHandler(debug=debug))
        logger.propagate = False
    warnings.showwarning = lambda message, *_, **__: _say("warning", "yellow", str(message))


@contextmanager
def spinner(message: str) -> Iterator[None]:
    """Show on a terminal that something takes a while; elsewhere say nothing."""
    if is_terminal(sys.stderr):
        with err.status(message):
            yield
    else:
        yield


def describe_stats(parts: Sequence[RequestStats]) -> list[str]:
    """Put the counts of one or more answers into words, a line for each kind."""
    from ..engine.stats import add_counts

    total = add_counts(list(parts))
    decode_s = sum(each.e2e_s - each.ttft_s for each in parts)
    num_timed = sum(max(0, each.num_emitted - 1) for each in parts)
    ttft_s = sum(each.ttft_s for each in parts) / max(1, len(parts))
    speed = f"{num_timed / decode_s:.1f} tokens/s" if num_timed and decode_s > 0 else "no speed yet"
    mean = "on average " if len(parts) > 1 else ""
    lines = [f"{total.num_emitted} tokens: the first after {mean}{ttft_s:.2f} s, then {speed}"]
    if total.num_drafted == 0:
        return [*lines, "no drafts: every token took a pass of its own"]
    accepted, drafted = total.num_accepted, total.num_drafted
    lines.append(f"draft acceptance rate {accepted / drafted:.1%} ({accepted} of {drafted} tokens)")
    length = total.num_emitted / max(1, total.num_steps)
    lines.append(
        f"mean acceptance length {length:.2f} (tokens per pass, the target's own included)"
    )
    lines.append("accepted by position: " + _positions(total))
    if total.drafter_faults:
        faults = ", ".join(f"{name} {count}" for name, count in total.drafter_faults.items())
        lines.append(f"drafter failures, answered by plain decoding: {faults}")
    return lines


def _positions(total: Any) -> str:
    offered = total.offered_by_position
    accepted = [*total.accepted_by_position, *[0] * len(offered)]
    rates = [f"{a / o:.0%}" for a, o in zip(accepted, offered, strict=False)]
    more = len(rates) - MAX_POSITIONS_SHOWN
    rest = f" (and {more} more)" if more > 0 else ""
    return " ".join(rates[:MAX_POSITIONS_SHOWN]) + rest


def _say(label: str, style: str, message: str) -> None:
    line = Text.assemble((f"{label}: ", style), printable(" ".join(message.split())))
    err.print(line, soft_wrap=True)


class _StderrHandler(logging.Handler):
    """One line per warning. What is worse is raised as well, and said by whoever catches it."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__(logging.WARNING)
        self._debug = debug

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING or self._debug:
            _say(record.levelname.lower(), "yellow", record.getMessage())
            if self._debug and record.exc_info:
                sys.stderr.write(logging.Formatter().formatException(record.exc_info) + "\n")
