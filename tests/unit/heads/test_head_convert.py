"""Pickled heads become safetensors once, offline; files that hold code are refused unread."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.tiny_heads import (
    LAYOUTS,
    TARGET,
    eagle1_original,
    eagle3_specforge,
    eagle_config,
    edit_config,
    make_head,
    medusa_config,
    medusa_original,
    medusa_tensors,
    same_head,
)
from safetensors.torch import load_file

import forerun
from forerun.errors import ConfigError, ModelFileError, ModelNotFound, UnsupportedModel
from forerun.heads.config import Head
from forerun.heads.convert import convert_head
from forerun.heads.explain import explain
from forerun.heads.loader import open_head

SOURCE = Path(forerun.__file__).parent
HEADS = {
    "eagle1": eagle_config(TARGET, 1),
    "eagle3": eagle_config(TARGET, 3, norm_before_residual=False),
    "medusa": medusa_config(TARGET),
}


def pickled(folder: Path, name: str = "pytorch_model.bin", wrapper: str | None = None) -> Path:
    """Put a folder's tensors into a pickle instead of its safetensors file."""
    tensors: Any = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors if wrapper is None else {wrapper: tensors, "epoch": 3}, folder / name)
    return folder


def converted(source: Path, folder: Path) -> Head:
    done = convert_head(source, folder, TARGET)
    found = open_head(folder, TARGET)
    assert same_head(found, done.head)
    assert found.notes == done.head.notes
    return found


@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, layout) for kind in LAYOUTS for layout in LAYOUTS[kind]]
)
def test_every_layout_survives(tmp_path: Path, kind: str, layout: str) -> None:
    head = make_head(HEADS[kind], dtype=torch.bfloat16)
    folder = LAYOUTS[kind][layout](tmp_path / "head", head)
    before = json.loads((folder / "config.json").read_text())
    assert same_head(converted(pickled(folder), tmp_path / "out"), head)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_checkpoints_that_wrap_their_tensors(tmp_path: Path, wrapper: str) -> None:
    head = make_head(HEADS["eagle1"])
    folder = pickled(eagle1_original(tmp_path / "head", head), "epoch_3.pt", wrapper)
    assert same_head(converted(folder, tmp_path / "out"), head)


def test_medusa_as_one_file_without_configuration(tmp_path: Path) -> None:
    head = make_head(medusa_config(TARGET, num_heads=4, num_blocks=2))
    torch.save(medusa_tensors(head), tmp_path / "medusa_lm_head.pt")
    assert same_head(converted(tmp_path / "medusa_lm_head.pt", tmp_path / "out"), head)


def test_medusa_whose_blocks_are_one_tensor(tmp_path: Path) -> None:
    tensors = medusa_tensors(make_head(medusa_config(TARGET, num_blocks=2)))
    for head in range(3):  # as the first training program built them
        for kind in ("weight", "bias"):
            tensors[f"{head}.1.linear.{kind}"] = tensors[f"{head}.0.linear.{kind}"]
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    found = converted(tmp_path, tmp_path / "out")
    first, second = (found.weights[f"heads.2.blocks.{block}.weight"] for block in (0, 1))
    assert torch.equal(first, second)


def test_shards_and_what_training_leaves_beside_them(tmp_path: Path) -> None:
    head = make_head(HEADS["eagle3"])
    folder = eagle3_specforge(tmp_path / "head", head)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for index, part in enumerate((names[::2], names[1::2])):
        torch.save({name: tensors[name] for name in part}, folder / f"pytorch_model-{index}.bin")
    (folder / "training_state.pt").write_bytes(b"no head")
    assert same_head(converted(folder, tmp_path / "out"), head)
    torch.save({names[0]: tensors[names[0]]}, folder / "pytorch_model-2.bin")
    with pytest.raises(ModelFileError, match=r"another file has d2t too"):
        convert_head(folder, None, TARGET)


def test_safetensors_are_a_source_too(tmp_path: Path) -> None:
    head = make_head(HEADS["medusa"])
    folder = medusa_original(tmp_path / "head", head)
    assert same_head(converted(folder, tmp_path / "out"), head)
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.safetensors")
    (folder / "config.json").unlink()
    file = folder / "medusa_lm_head.safetensors"
    assert same_head(converted(file, tmp_path / "from_file"), head)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ModelFileError, match="no whole safetensors"):
        convert_head(file, None, TARGET)


def test_checking_writes_nothing(tmp_path: Path) -> None:
    folder = pickled(eagle1_original(tmp_path / "head", make_head(HEADS["eagle1"])))
    before = sorted(tmp_path.rglob("*"))
    done = convert_head(folder, None, TARGET)
    assert done.files == ("pytorch_model.bin",)
    assert sorted(tmp_path.rglob("*")) == before


class Malicious:
    """Runs code when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.witness,))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_is_refused_and_does_not_run(tmp_path: Path, zipped: bool) -> None:
    witness = tmp_path / "it_ran"
    folder = tmp_path / "head"
    folder.mkdir()
    tensors = {**medusa_tensors(make_head(HEADS["medusa"])), "extra": Malicious(witness)}
    path = folder / "medusa_lm_head.pt"
    if zipped:
        torch.save(tensors, path)
    else:
        path.write_bytes(pickle.dumps({"extra": Malicious(witness)}, protocol=2))
    with pytest.raises(ModelFileError, match=r"medusa_lm_head\.pt: asks for .*may be code"):
        convert_head(folder, tmp_path / "out", TARGET)
    assert not witness.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, 2], "holds a list"),
        ({"a": 1}, "no tensors"),
        ({"a": torch.ones(2, 2).to_sparse()}, "sparse"),
        (b"rubbish", None),
        (b"", None),
    ],
    ids=["list", "numbers", "sparse", "rubbish", "empty"],
)
def test_files_that_hold_no_head(tmp_path: Path, value: Any, words: str | None) -> None:
    path = tmp_path / "head.bin"
    if isinstance(value, bytes):
        path.write_bytes(value)
    else:
        torch.save(value, path)
    with pytest.raises(ModelFileError, match=words or r"head\.bin"):
        convert_head(path, None, TARGET)


def test_a_file_cut_short(tmp_path: Path) -> None:
    torch.save(medusa_tensors(make_head(HEADS["medusa"])), tmp_path / "head.pt")
    whole = (tmp_path / "head.pt").read_bytes()
    (tmp_path / "head.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match=r"head\.pt: no whole file"):
        convert_head(tmp_path, None, TARGET)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nothing there"):
        convert_head(tmp_path / "no", None, TARGET)
    with pytest.raises(ModelFileError, match="no weights"):
        convert_head(tmp_path, None, TARGET)
    folder = pickled(eagle1_original(tmp_path / "head", make_head(HEADS["eagle1"])))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("")
    with pytest.raises(ConfigError, match="is there already"):
        convert_head(folder, tmp_path / "there", TARGET)
    edit_config(folder, vocab_size=99)
    with pytest.raises(UnsupportedModel, match="99 tokens"):
        convert_head(folder, tmp_path / "out", TARGET)
    assert not (tmp_path / "out").exists()
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match="only Medusa heads can do without"):
        convert_head(folder, None, TARGET)


def test_heads_in_words(tmp_path: Path) -> None:
    folder = eagle3_specforge(tmp_path / "e", make_head(HEADS["eagle3"], dtype=torch.bfloat16))
    edit_config(folder, max_position_embeddings=64)
    assert explain(open_head(folder, TARGET)) == [
        "kind: EAGLE-3, one llama layer",
        "sizes: hidden 32, feed-forward 48, 4 query and 2 key heads of 8",
        "reads: the residual stream after layers 2, 4, 5",
        "positions: 64",
        "embeddings: the target's own; vocabulary projection: its own",
        "weights: 13,952 in bfloat16",
        "drafts: 32 of 64 tokens (50%)",
        "made for: not said",
        "note: the head was made for 64 positions, the target for 128: drafting stops at position "
        "64",
    ]
    heads = make_head(medusa_config(TARGET, shared_head=True))
    text = "\n".join(explain(heads))
    assert "kind: Medusa, 3 heads of 1 residual blocks" in text
    assert "vocabulary projection: one for all heads" in text
    assert "drafts: all 64 tokens" in text
    variant = make_head(eagle_config(TARGET, 3, norm_before_fc="each", norm_output=True))
    assert "kind: EAGLE-3.1, one llama layer" in explain(variant)
    assert "variant: a norm per input before fc" in explain(variant)
    assert "kind: EAGLE-1 (the same weights serve EAGLE-2), one llama layer" in explain(
        make_head(HEADS["eagle1"])
    )


def imported_modules(path: Path) -> set[str]:
    """List by their full names the modules that a file of the package may import."""
    package = ["forerun", *path.relative_to(SOURCE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found


def test_only_the_command_line_converts() -> None:
    importers = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if "forerun.heads.convert" in imported_modules(path)
    }
    assert importers == {"cli/convert.py"}
    assert "forerun.heads.loader" in imported_modules(SOURCE / "heads" / "convert.py")


def test_nothing_else_unpickles() -> None:
    loads = {("torch", "load"), ("pickle", "load"), ("pickle", "loads")}
    users = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in loads
    }
    assert users == {"heads/convert.py"}
