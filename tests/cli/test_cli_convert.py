"""`forerun convert`: what it says, what it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_process import Cli, Ended
from reference.tiny import Tiny
from reference.tiny_heads import (
    eagle3_specforge,
    eagle_config,
    make_head,
    medusa_config,
    medusa_tensors,
    same_head,
)

from forerun.heads.config import Head
from forerun.heads.loader import open_head
from forerun.model.loader import open_model


@pytest.fixture
def medusa(tiny: Tiny, tmp_path: Path) -> tuple[Path, Head]:
    head = make_head(medusa_config(open_model(tiny.folder).config))
    torch.save(medusa_tensors(head), tmp_path / "medusa_lm_head.pt")
    return tmp_path / "medusa_lm_head.pt", head


def assert_refused(ended: Ended, *words: str) -> None:
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    for word in words:
        assert word in ended.stderr


def test_convert_writes_what_it_says(
    inside: Cli, tiny: Tiny, medusa: tuple[Path, Head], tmp_path: Path
) -> None:
    source, head = medusa
    folder = tmp_path / "out"
    ended = inside("convert", str(source), "--out", str(folder), "--model", str(tiny.folder))
    assert ended.code == 0
    assert ended.stderr == ""
    lines = ended.stdout.splitlines()
    assert lines[:2] == [
        "read: medusa_lm_head.pt",
        "kind: Medusa, 3 heads of 1 residual blocks",
    ]
    assert lines[-1] == f"written: {folder}"
    assert same_head(open_head(folder, open_model(tiny.folder).config), head)
    again = inside("convert", str(source), "--out", str(folder), "--model", str(tiny.folder))
    assert_refused(again, "is there already")


def test_check_explains_only(inside: Cli, tiny: Tiny, tmp_path: Path) -> None:
    target = open_model(tiny.folder).config
    config = eagle_config(target, 3, feature_layers=(0, 1, 2), layer_options={"max_positions": 64})
    folder = eagle3_specforge(tmp_path / "head", make_head(config))
    before = sorted(tmp_path.rglob("*"))
    ended = inside("convert", str(folder), "--check", "--model", str(tiny.folder))
    assert ended.code == 0
    assert "reads: the residual stream after layers 0, 1, 2" in ended.stdout
    notes = [line for line in ended.stdout.splitlines() if line.startswith("note: ")]
    assert notes
    assert "drafting stops at position 64" in notes[0]
    assert ended.stderr == ""  # a note is said once
    assert sorted(tmp_path.rglob("*")) == before


def test_what_convert_refuses(
    inside: Cli, tiny: Tiny, medusa: tuple[Path, Head], tmp_path: Path
) -> None:
    source, _ = medusa
    model = ("--model", str(tiny.folder))
    assert_refused(inside("convert", str(source), *model), "--out DIR", "--check")
    both = inside("convert", str(source), *model, "--out", str(tmp_path / "o"), "--check")
    assert_refused(both, "--out DIR", "--check")
    assert_refused(inside("convert", str(tmp_path / "no"), *model, "--check"), "nothing there")
    assert_refused(inside("convert", str(source), "--check", "--model", "nowhere"), "'nowhere'")
    assert_refused(inside("convert", str(source), "--check"), "missing option '--model'")
    source.write_bytes(b"rubbish")
    assert_refused(inside("convert", str(source), *model, "--check"), "medusa_lm_head.pt")
