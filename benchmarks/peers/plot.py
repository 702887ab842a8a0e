"""The picture of a comparison. matplotlib is optional: without it there is none, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .summary import LoadRow, Row

__all__ = ["draw", "draw_load"]

COLOURS = {"forerun": "#c0392b"}  # the others share one
OTHER = "#5d6d7e"


def draw(rows: Sequence[Row], ratios: dict[str, list[float]], title: str, path: Path) -> str:
    """Draw decode rates and per-prompt ratios to forerun plain; say what came of it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is missing (pip install matplotlib)"
    figure = Figure(figsize=(12, 1.5 + 0.45 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row.contestant for row in rows]
    for place, row in enumerate(rows):
        colour = COLOURS.get(row.contestant.split(":")[0], OTHER)
        light = 0.45 if ":plain" in row.contestant else 1.0
        if (rate := row.tokens_per_s) is not None:
            whiskers = [[rate.median - rate.low], [rate.high - rate.median]]
            left.barh(place, rate.median, xerr=whiskers, color=colour, alpha=light, capsize=3)
        points = ratios.get(row.contestant, [])
        right.plot(points, [place] * len(points), "|", color=colour, markersize=12, alpha=0.6)
        if row.ratio is not None:
            right.plot(row.ratio.median, place, "o", color=colour)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel("decode tokens/s: median of runs, quartiles")
    right.set_xscale("log")
    right.axvline(1, color="black", linewidth=0.8)
    right.set_xlabel("x forerun plain: each prompt, and their median")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    return f"picture: {path}"


def draw_load(rows: Sequence[LoadRow], title: str, path: Path) -> str:
    """Draw output tokens/s against concurrency; say what came of it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is missing (pip install matplotlib)"
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row.contestant for row in rows):
        mine = [row for row in rows if row.contestant == name]
        rates = [row.tokens_per_s for row in mine]
        whiskers = [[r.median - r.least for r in rates], [r.most - r.median for r in rates]]
        style = "--" if ":plain" in name else "-"
        axes.errorbar(
            [row.concurrency for row in mine], [rate.median for rate in rates], yerr=whiskers,
            marker="o", linestyle=style, label=name, capsize=3,
        )  # fmt: skip
    axes.set_xlabel("requests at once")
    axes.set_ylabel("output tokens/s")
    axes.set_xticks(sorted({row.concurrency for row in rows}))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    return f"picture: {path}"
