"""The demo while it runs: two panes on a terminal, a line per run elsewhere; then the table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..measure.compare import Row, Run
from .screen import out, printable

if TYPE_CHECKING:
    from ..engine.results import Chunk
    from ..text import TextCodec

__all__ = ["LineWatcher", "LiveWatcher", "make_table"]

ACCEPTED = "green"
LEGEND = ": guessed by the drafter, confirmed by the model"
MAX_PANE_LINES = 14
CHROME_LINES = 12  # what else stands on the screen: borders, headings, results


class LineWatcher:
    """One line per run, for a log."""

    def begin(self, title: str, *, speculative: bool, round_number: int) -> None:
        """Say nothing yet."""

    def take(self, chunk: Chunk) -> None:
        """Say nothing yet."""

    def end(self, run: Run) -> None:
        speed = f"{_number(run.tokens_per_s)} tokens/s"
        num_tokens = run.result.stats.num_emitted
        head = f"{run.title:<11} {run.mode:<11} round {run.round_number}"
        out.print(f"{head}: {speed:>16}, {num_tokens} tokens")

    def conclude(self, row: Row) -> None:
        """The table says it."""


class LiveWatcher:
    """Plain on the left, speculative on the right; accepted draft tokens in colour.

    Chunks are only appended here; text is laid out when the screen is drawn, a few times a second.
    """

    def __init__(self, codec: TextCodec, num_rounds: int) -> None:
        self._codec = codec
        self._num_rounds = num_rounds
        self._panes = {False: _Pane("plain"), True: _Pane("speculative")}
        self._current = self._panes[False]
        self._heading = ""
        self._concluded: list[Row] = []

    def begin(self, title: str, *, speculative: bool, round_number: int) -> None:
        if not speculative:
            self._panes[True].clear()
        self._heading = f"{title}, round {round_number} of {self._num_rounds}"
        self._current = self._panes[speculative]
        self._current.clear()

    def take(self, chunk: Chunk) -> None:
        self._current.add(chunk, _guessed_length(self._codec, chunk))

    def end(self, run: Run) -> None:
        self._current.settle(run)

    def conclude(self, row: Row) -> None:
        self._concluded.append(row)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = (options.max_width - 1) // 2
        height = max(4, min(MAX_PANE_LINES, console.height - CHROME_LINES))
        panes = Table.grid(padding=(0, 1, 0, 0))
        panes.add_row(*[pane.draw(console, width, height) for pane in self._panes.values()])
        legend = Text.assemble(
            ("green", ACCEPTED), ": guessed by the drafter, confirmed by the model"
        )
        legend.stylize("dim")
        results = [Text(_summary(row)) for row in self._concluded]
        yield Group(Text(self._heading, style="bold"), panes, legend, *results)


class _Pane:
    """The text of one mode as far as it has come, and how fast it comes."""

    def __init__(self, title: str) -> None:
        self._title = title
        self.clear()

    def clear(self) -> None:
        self._text = Text()
        self._num_tokens = 0
        self._first_s = 0.0
        self._final: float | None = None

    def add(self, chunk: Chunk, num_guessed_chars: int) -> None:
        now_s = time.perf_counter()
        if self._num_tokens == 0:
            self._first_s = now_s
        self._last_s = now_s
        self._num_tokens += len(chunk.token_ids)
        self._text.append(printable(chunk.text[:num_guessed_chars]), style=ACCEPTED)
        self._text.append(printable(chunk.text[num_guessed_chars:]))

    def settle(self, run: Run) -> None:
        self._final = run.tokens_per_s

    def draw(self, console: Console, width: int, height: int) -> Panel:
        text = self._text.copy()  # the other thread goes on appending
        lines = text.wrap(console, width - 4)
        tail = Text("\n").join(lines[-height:])
        title = f"{self._title}  {self._speed()}" if self._num_tokens else self._title
        style = "bold" if self._final is None and self._num_tokens else "dim"
        return Panel(
            tail,
            title=title,
            title_align="left",
            width=width,
            height=height + 2,
            border_style=style,
        )

    def _speed(self) -> str:
        if self._final is not None:
            return f"{self._final:.1f} tokens/s"
        elapsed_s = self._last_s - self._first_s
        return (
            f"{(self._num_tokens - 1) / elapsed_s:.0f} tokens/s so far" if elapsed_s > 0 else "..."
        )


def make_table(rows: Sequence[Row]) -> Table:
    """Lay out the results; the headings say what is counted."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("\n\nprompt", no_wrap=True)
    for heading in (
        "\nplain\ntokens/s",
        "\nspeculative\ntokens/s",
        "\n\nspeedup",
        "draft\nacceptance\nrate",
        "mean\nacceptance\nlength",
        "\nsame\ntext",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.title,
            _number(row.plain_tokens_per_s),
            _number(row.speculative_tokens_per_s),
            _times(row.speedup),
            f"{row.draft_acceptance_rate:.0%}",
            f"{row.mean_acceptance_length:.2f}",
            "yes" if row.first_difference is None else "no",
        )
    return table


def _guessed_length(codec: TextCodec, chunk: Chunk) -> int:
    """How many characters of a chunk's text are draft tokens'; near enough for a colour."""
    if chunk.num_accepted == 0:
        return 0
    if chunk.num_accepted == len(chunk.token_ids):
        return len(chunk.text)
    return len(codec.decode_after(chunk.token_ids[: chunk.num_accepted]))


def _summary(row: Row) -> str:
    same = "same text" if row.first_difference is None else "the texts differ"
    plain, speculative = _number(row.plain_tokens_per_s), _number(row.speculative_tokens_per_s)
    times = _times(row.speedup)
    return f"{row.title:<11} {plain:>6} -> {speculative:>6} tokens/s {times:>7}, {same}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} x"
