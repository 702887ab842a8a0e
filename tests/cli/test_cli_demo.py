"""`forerun demo`: the comparison, the live view and the table at 80 columns, and the whole."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from cli_process import Cli
from rich.console import Console

from forerun.cli.demo_view import LiveWatcher, make_table
from forerun.engine.results import Chunk
from forerun.measure.compare import Row, Run
from forerun.measure.prompts import DEMO_PROMPTS


def make_run(tokens: Sequence[int], *, speculative: bool, tpot_s: float = 0.02) -> Run:
    stats = SimpleNamespace(
        tpot_s=tpot_s, draft_acceptance_rate=0.5, mean_acceptance_length=3.25, num_emitted=4
    )
    result: Any = SimpleNamespace(token_ids=tuple(tokens), stats=stats)
    return Run("open prose", speculative, 1, result)


def make_row(plain: Sequence[int], *others: Sequence[int]) -> Row:
    drafted = [make_run(each, speculative=True, tpot_s=0.005) for each in others]
    return Row("open prose", (make_run(plain, speculative=False), *drafted))


def test_speedup_is_the_ratio_of_medians() -> None:
    row = make_row([1, 2], [1, 2])
    assert row.plain_tokens_per_s == pytest.approx(50)
    assert row.speculative_tokens_per_s == pytest.approx(200)
    assert row.speedup == pytest.approx(4)


@pytest.mark.parametrize(
    ("texts", "place"),
    [
        (([1, 2, 3], [1, 2, 3]), None),
        (([1, 2, 3], [1, 9, 3]), 2),
        (([1, 2, 3], [1, 2]), 3),
        (([1], [1, 2]), 2),
        (([1, 2], [1, 2], [0, 2]), 1),
    ],
)
def test_first_difference(texts: tuple[list[int], ...], place: int | None) -> None:
    assert make_row(*texts).first_difference == place


def draw(renderable: Any, width: int) -> str:
    screen = Console(file=io.StringIO(), force_terminal=True, width=width, height=24)
    with screen.capture() as capture:
        screen.print(renderable)
    return capture.get()


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_whole(width: int) -> None:
    plain = Console(file=io.StringIO(), width=width)
    with plain.capture() as capture:
        plain.print(make_table([make_row([1, 2], [1, 3])]))
    text = capture.get()
    assert "…" not in text
    for words in ("open prose", "50.0", "200.0", "4.00 x", "50%", "3.25", "no"):
        assert words in text


@pytest.mark.parametrize("width", [80, 120])
def test_live_view_colours_what_was_guessed(width: int) -> None:
    codec: Any = SimpleNamespace(decode_after=lambda ids: " guessed")
    watcher = LiveWatcher(codec, num_rounds=2)
    watcher.begin("edit", speculative=True, round_number=1)
    for _ in range(40):
        watcher.take(Chunk(" guessed own\x1b[2J", (1, 2), 1, None))
    watcher.conclude(make_row([1], [1]))
    text = draw(watcher, width)
    assert "\x1b[32m guessed\x1b[0m own" in text
    assert "\x1b[2J" not in text
    assert "edit, round 1 of 2" in text
    assert "same text" in text
    assert len(text.splitlines()) < 24


@pytest.mark.model
def test_demo_from_end_to_end(outside: Cli, model: str) -> None:
    ended = outside(
        "demo", "--model", model, "--max-tokens", "16", "--rounds", "1", "--dtype", "float32",
        "--json",
    )  # fmt: skip
    assert ended.code == 0
    assert ended.stderr == ""
    report = json.loads(ended.stdout.splitlines()[-1])
    assert [row["prompt"] for row in report["rows"]] == [each.title for each in DEMO_PROMPTS]
    for row in report["rows"]:
        assert row["same_text"]
        assert [run["mode"] for run in row["runs"]] == ["plain", "speculative"]
        assert row["runs"][0]["stats"]["num_drafted"] == 0
        assert row["runs"][1]["stats"]["num_cached_tokens"] == 0
    assert report["rows"][0]["mean_acceptance_length"] > 1
    assert report["dtype"] == "float32"
    assert "speedup" in ended.stdout
    assert "after a warm-up" in ended.stdout.replace("\n", " ")
