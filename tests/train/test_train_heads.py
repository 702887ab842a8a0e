"""From rows to a head on disk that an engine drafts with, for every kind, by the command."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from train_tools import random_rows

from forerun import Engine, SamplingParams
from forerun.cli import main
from forerun.heads.config import EagleConfig
from forerun.heads.loader import open_head
from forerun.model.loader import open_model
from forerun.train.rows import append_rows, is_held_out


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    append_rows(folder, random_rows(80, 5, (4, 12)))
    return folder


def command(kind: str, chatty: Path, out: Path, rows: Path, *more: str) -> list[str]:
    return [
        "train", kind, "--model", str(chatty), "--out", str(out), "--rows", str(rows),
        "--epochs", "1", "--batch-tokens", "64", "--draft-vocab", "110", "--threads", "1", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_the_head_drafts_and_changes_nothing(
    kind: str, chatty: Path, rows: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "head"
    assert main(command(kind, chatty, out, rows)) == 0
    said = capsys.readouterr().out
    assert "of held-out" not in said
    assert "held-out chains that hold" in said
    head = open_head(out, open_model(chatty).config)
    assert head.config.draft_vocab_size == 110
    assert head.verifier == str(chatty)
    card = (out / "README.md").read_text()
    figures = json.loads((out / "training.json").read_text())
    assert f"--out {out}" in card
    assert "| temperature 0 |" in card
    assert figures["history"][-1]["acceptance"]["greedy"]
    drafter = "eagle" if isinstance(head.config, EagleConfig) else "medusa"
    prompts = [[5, 6, 7], [9, 30, 31, 32]]
    answers = []
    for options in ({"drafter": "none"}, {"drafter": drafter, "model": str(out)}):
        with Engine.from_pretrained(
            str(chatty), speculation=options, dtype="float32", num_threads=1, max_model_len=128,
            kv_cache_tokens=1024,
        ) as engine:  # fmt: skip
            params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            answers.append([each.token_ids for each in engine.generate(prompts, params)])
    assert answers[0] == answers[1]


def test_a_head_goes_on_learning(chatty: Path, rows: Path, tmp_path: Path) -> None:
    assert main(command("eagle", chatty, tmp_path / "a", rows)) == 0
    target = open_model(chatty).config
    more = ["--resume", str(tmp_path / "a"), "--learning-rate", "1e-9"]
    assert main(command("eagle", chatty, tmp_path / "b", rows, *more)) == 0
    first, second = (open_head(tmp_path / name, target) for name in "ab")
    assert first.config == second.config
    assert torch.equal(first.draft_ids, second.draft_ids)
    for name, weight in first.weights.items():
        torch.testing.assert_close(weight.float(), second.weights[name].float())


def test_what_cannot_be_is_refused_before_anything_is_loaded(
    chatty: Path, rows: Path, tmp_path: Path, capsys
) -> None:
    assert main(command("eagle4", chatty, tmp_path / "head", rows)) == 2
    assert "eagle, eagle3, medusa" in capsys.readouterr().err
    (tmp_path / "file").write_text("something")
    assert main(command("eagle", chatty, tmp_path, rows)) == 2
    assert "there already" in capsys.readouterr().err
    few = tmp_path / "few"
    few.mkdir()
    append_rows(few, [row for row in random_rows(9) if not is_held_out(row.id)])
    assert main(command("eagle", chatty, tmp_path / "head", few)) == 2
    assert "too few" in capsys.readouterr().err


def test_curves_need_matplotlib_and_say_so(
    chatty: Path, rows: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    assert main(command("medusa", chatty, tmp_path / "head", rows)) == 0
    assert "matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "head" / "curves.png").exists()


def test_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from forerun.train.checkpoint import Judgement
    from forerun.train.curves import draw_curves
    from forerun.train.evaluate import Acceptance

    rates = Acceptance((0.4, 0.2), (0.4, 0.2), 9)
    draw_curves([Judgement(1, 10, 3.0, rates), Judgement(2, 20, 2.0, rates)], tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
