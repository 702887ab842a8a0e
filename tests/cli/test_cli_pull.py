"""`forerun pull`: lists, says where a model is, shows each stage. Nothing is downloaded here."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_process import Cli
from rich.console import Console
from rich.progress import Progress, TextColumn

from forerun import registry
from forerun.cli.pull import _Bars
from forerun.registry import PullProgress

STATES = (
    PullProgress("download", 0, 90_000_000),
    PullProgress("download", 45_000_000, 90_000_000),
    PullProgress("convert", 3, 272),
)


def fake_pull(name: str, *, report: Callable[[PullProgress], None]) -> Path:
    for state in STATES:
        report(state)
    return Path("/models") / name


@pytest.mark.parametrize("line", [["pull"], ["pull", "--list"]])
def test_list_of_known_models(inside: Cli, no_models: Path, line: list[str]) -> None:
    ended = inside(*line)
    assert ended.code == 0
    assert "smollm2-135m  not here yet; fetch it with: forerun pull smollm2-135m" in ended.stdout
    assert str(no_models) in ended.stdout


def test_pull_says_where_and_how_long(
    inside: Cli, no_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "pull", fake_pull)
    ended = inside("pull", "smollm2-135m")
    assert ended.code == 0
    assert ended.stdout.startswith("smollm2-135m is at /models/smollm2-135m (0.")
    assert ended.stderr.splitlines() == ["downloading ...", "converting ..."]


def test_bars_on_a_terminal() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    columns = (TextColumn("{task.description}"), TextColumn("{task.fields[amount]}"))
    with Progress(*columns, console=screen) as progress:
        bars = _Bars(progress)
        for state in STATES:
            bars(state)
        download, convert = progress.tasks
    assert download.finished
    assert download.fields["amount"] == "45 of 90 MB"
    assert (convert.completed, convert.total) == (3, 272)
    assert convert.fields["amount"] == "3 of 272 tensors"
