"""The tables on standard output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .summary import LoadRow, Row, Spread

__all__ = ["group_table", "load_table", "main_table"]

NONE = "-"


def main_table(rows: Sequence[Row], hellos: Mapping[str, Mapping[str, Any]]) -> str:
    """Lay out a line for each contestant."""
    head = [
        "contestant", "version, dtype", "tok/s median (quartiles)", "all tok/s", "e2e tok/s",
        "ttft ms", "tok/step", "accepted", "same as plain", "as forerun",
        "x forerun plain (quartiles; range)",
    ]  # fmt: skip
    body = [
        [
            row.contestant,
            _version(hellos[row.contestant]),
            _spread(row.tokens_per_s, 1),
            _number(row.total_tokens_per_s, 1),
            _number(row.end_to_end_tokens_per_s, 1),
            _number(row.ttft_s.median * 1e3 if row.ttft_s else None, 0),
            _number(row.tokens_per_step, 2),
            f"{row.draft_acceptance_rate:.0%}" if row.draft_acceptance_rate is not None else NONE,
            _share(row.same_as_plain, row.num_prompts),
            _share(row.same_as_reference, row.num_prompts),
            _range(row.ratio),
        ]
        for row in rows
    ]
    return _lay_out([head, *body])


def group_table(rows: Sequence[Row], groups: Sequence[str]) -> str:
    """Lay out the decode rate of each contestant in each group, and its ratio to forerun plain."""
    found = {(row.contestant, row.group): row for row in rows}
    body = []
    for name in dict.fromkeys(row.contestant for row in rows):
        cells = [name]
        for group in groups:
            row = found.get((name, group))
            rate = row.tokens_per_s.median if row and row.tokens_per_s else None
            ratio = row.ratio.median if row and row.ratio else None
            cells.append(f"{_number(rate, 1)} ({_number(ratio, 2)})")
        body.append(cells)
    return _lay_out([["tok/s (x forerun plain)", *groups], *body])


def load_table(rows: Sequence[LoadRow]) -> str:
    """Lay out a line for each contestant, a column for each concurrency."""
    levels = sorted({row.concurrency for row in rows})
    found = {(row.contestant, row.concurrency): row for row in rows}
    body = []
    for name in dict.fromkeys(row.contestant for row in rows):
        cells = [name]
        for level in levels:
            row = found.get((name, level))
            if row is None:
                cells.append(NONE)
                continue
            ratio = f" {row.ratio.median:.2f} x" if row.ratio else ""
            cells.append(f"{_spread(row.tokens_per_s, 1)}{ratio}")
        body.append(cells)
    return _lay_out([["output tok/s, x forerun plain", *(f"{n} at once" for n in levels)], *body])


def _version(hello: Mapping[str, Any]) -> str:
    number = next(iter(hello.get("versions", {}).values()), None)
    return f"{number or '?'}, {hello.get('dtype', '?')}"


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _spread(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return NONE
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def _range(spread: Spread | None) -> str:
    if spread is None:
        return NONE
    return f"{_spread(spread, 2)[:-1]}; {spread.least:.2f}-{spread.most:.2f})"


def _share(part: int | None, whole: int) -> str:
    return NONE if part is None else f"{part}/{whole}"


def _lay_out(lines: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )
