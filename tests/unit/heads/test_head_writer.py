"""What we write is read back as it was, and by vLLM and SGLang as what it is."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference.engines_heads import as_sglang, as_vllm, vllm_draft_ids, vllm_weight_names
from reference.tiny_heads import (
    TARGET,
    VERIFIER,
    eagle_config,
    make_head,
    medusa_config,
    same_head,
)
from safetensors.torch import load_file

from forerun.errors import ConfigError, ForerunError, ModelFileError, UnsupportedModel
from forerun.heads.config import Head
from forerun.heads.loader import open_head
from forerun.heads.writer import save_head
from forerun.model.arch import LinearScaling, Llama3Scaling, RopeConfig

HEADS = {
    "eagle1": eagle_config(TARGET, 1),
    "eagle1 all": eagle_config(
        TARGET, 1, input_norm=True, output_norm=True, own_embeddings=True, own_head=True,
        draft_vocab_size=24, fc_bias=False, layer_options={"qkv_bias": True, "o_bias": True},
    ),
    "eagle1 cut": eagle_config(TARGET, 1, draft_vocab_size=24),
    "eagle3": eagle_config(TARGET, 3),
    "eagle3 whole": eagle_config(TARGET, 3, draft_vocab_size=64, own_embeddings=True),
    "eagle3 shared": eagle_config(TARGET, 3, draft_vocab_size=64, own_head=False),
    "eagle3 one norm": eagle_config(TARGET, 3, norm_before_fc="one"),
    "eagle3.1": eagle_config(TARGET, 3, norm_before_fc="each", norm_output=True),
    "eagle3 layers": eagle_config(TARGET, 3, feature_layers=(0, 3, 5, 8)),
    "eagle3 qwen3": eagle_config(TARGET, 3, layer_options={"family": "qwen3", "qk_norm": True}),
    "eagle3 wide": eagle_config(
        TARGET, 3, own_embeddings=True, layer_options={"hidden_size": 40, "head_size": 10}
    ),
    "eagle3 window": eagle_config(TARGET, 3, layer_options={"sliding_windows": (16,)}),
    "eagle3 linear": eagle_config(
        TARGET, 3, layer_options={"rope": RopeConfig(5e5, LinearScaling(4.0))}
    ),
    "eagle3 llama3": eagle_config(
        TARGET, 3, layer_options={"rope": RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64))}
    ),
    "medusa": medusa_config(TARGET),
    "medusa shared": medusa_config(TARGET, shared_head=True, num_blocks=2, block_bias=False),
    "medusa cut": medusa_config(TARGET, draft_vocab_size=20),
    "medusa bare": medusa_config(TARGET, own_head=False, shared_head=True, draft_vocab_size=20),
}  # fmt: skip
THIRD = [name for name in HEADS if name.startswith("eagle3")]


def save(head: Head, folder: Path, **options: Any) -> Path:
    told = {
        "verifier": VERIFIER,
        "num_speculative_tokens": 5,
        "architectures": ["LlamaForCausalLM"],
    }
    save_head(head, folder, **(told | options))
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HEADS)
def test_round_trip(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    head = make_head(HEADS[name], dtype=dtype)
    found = open_head(save(head, tmp_path / "head"), TARGET)
    assert same_head(found, head)
    assert (found.verifier, found.num_speculative_tokens, found.notes) == (VERIFIER, 5, ())
    again = open_head(save(found, tmp_path / "again"), TARGET)
    assert same_head(again, head)


@pytest.mark.parametrize("name", THIRD)
def test_vllm_reads_the_same_head(tmp_path: Path, name: str) -> None:
    config = HEADS[name]
    head = make_head(config)
    folder = save(head, tmp_path / "head")
    read = as_vllm(config_of(folder), TARGET.num_layers)
    assert read.layers == config.feature_layers
    assert read.norm_before_residual is False
    assert (read.norm_before_fc, read.norm_output) == (config.norm_before_fc, config.norm_output)
    assert read.draft_vocab_size == config.draft_vocab_size
    assert read.num_speculative_tokens == 5
    tensors = load_file(folder / "model.safetensors")
    names = tensors.keys() - {"d2t", "t2d", "embed_tokens.weight"}
    places = vllm_weight_names(read)
    assert names == (places if config.own_head else places - {"lm_head.weight"})
    assert tensors["fc.weight"].shape[1] == read.fc_inputs
    if head.draft_ids is not None:
        assert vllm_draft_ids(tensors, read.draft_vocab_size) == head.draft_ids.tolist()
        assert tensors["d2t"].dtype == torch.int64
        assert tensors["t2d"].dtype == torch.bool
        assert tensors["t2d"].nonzero().flatten().tolist() == sorted(head.draft_ids.tolist())


@pytest.mark.parametrize("name", [each for each in THIRD if each != "eagle3 qwen3"])
def test_sglang_reads_the_same_head(tmp_path: Path, name: str) -> None:
    config = HEADS[name]
    read = as_sglang(config_of(save(make_head(config), tmp_path / "head")), TARGET.num_layers)
    assert read.layers == config.feature_layers
    assert read.norm_before_residual is config.norm_before_residual
    assert read.draft_vocab_size == config.draft_vocab_size


@pytest.mark.parametrize("name", THIRD)
def test_transformers_reads_the_layer(tmp_path: Path, name: str) -> None:
    folder = save(make_head(HEADS[name]), tmp_path / "head")
    told = config_of(folder)["transformer_layer_config"]
    layer = HEADS[name].layer
    read = transformers.AutoConfig.for_model(**told)
    assert read.model_type == layer.family
    assert read.rope_parameters["rope_theta"] == layer.rope.theta
    kinds = {type(None): "default", LinearScaling: "linear", Llama3Scaling: "llama3"}
    assert read.rope_parameters["rope_type"] == kinds[type(layer.rope.scaling)]
    if layer.rope.scaling is not None:
        assert read.rope_parameters["factor"] == layer.rope.scaling.factor
    assert (read.hidden_size, read.head_dim) == (layer.hidden_size, layer.head_size)
    assert read.num_hidden_layers == 1
    assert read.vocab_size == 64


def test_golden_eagle3(tmp_path: Path) -> None:
    golden = json.loads((Path(__file__).parent / "golden_eagle3.json").read_text())
    folder = save(make_head(HEADS["eagle3"], dtype=torch.bfloat16), tmp_path / "head")
    assert config_of(folder) == golden
    assert sorted(load_file(folder / "model.safetensors")) == [
        "d2t",
        "fc.weight",
        "layers.0.hidden_norm.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.mlp.down_proj.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.post_attention_layernorm.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.v_proj.weight",
        "lm_head.weight",
        "norm.weight",
        "t2d",
    ]


def test_golden_eagle1(tmp_path: Path) -> None:
    golden = json.loads((Path(__file__).parent / "golden_eagle1.json").read_text())
    folder = save(make_head(HEADS["eagle1"], dtype=torch.bfloat16), tmp_path / "head")
    assert config_of(folder) == golden
    assert sorted(load_file(folder / "model.safetensors")) == [
        "fc.bias",
        "fc.weight",
        "layers.0.mlp.down_proj.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.post_attention_layernorm.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.v_proj.weight",
    ]


def test_golden_medusa(tmp_path: Path) -> None:
    golden = json.loads((Path(__file__).parent / "golden_medusa.json").read_text())
    folder = save(make_head(HEADS["medusa cut"]), tmp_path / "head")
    assert config_of(folder) == golden
    assert sorted(load_file(folder / "model.safetensors")) == [
        *(f"{head}.{rest}" for head in range(3) for rest in
          ("0.linear.bias", "0.linear.weight", "1.weight")),
        "d2t",
        "t2d",
    ]  # fmt: skip


def refused(head: Head, folder: Path, kind: type[ForerunError], words: str, **options: Any) -> None:
    with pytest.raises(kind, match=words):
        save(head, folder, **options)
    assert list(folder.parent.iterdir()) == []


def test_what_other_engines_would_misread(tmp_path: Path) -> None:
    folder = tmp_path / "head"

    def third(**options: Any) -> Head:
        return make_head(eagle_config(TARGET, 3, **options))

    refused(third(norm_before_residual=True), folder, UnsupportedModel, "SGLang.*train the head")
    refused(third(fc_bias=True), folder, UnsupportedModel, r"vLLM has no fc\.bias")
    refused(third(own_head=False), folder, UnsupportedModel, r"32 tokens.*draft_ids.*own_head")
    uneven = third(layer_options={"qkv_bias": True})
    refused(uneven, folder, UnsupportedModel, "biases on some projections only")


def test_heads_that_contradict_themselves(tmp_path: Path) -> None:
    folder, head = tmp_path / "head", make_head(HEADS["eagle3"])
    weights = dict(head.weights)
    del weights["norm.weight"]
    refused(replace(head, weights=weights), folder, ModelFileError, r"norm\.weight")
    weights = {**head.weights, "norm.weight": torch.ones(31)}
    refused(replace(head, weights=weights), folder, ModelFileError, r"\[31\], expected \[32\]")
    weights = {**head.weights, "norm.weight": torch.full((32,), torch.nan)}
    refused(replace(head, weights=weights), folder, ModelFileError, r"norm\.weight holds NaN")
    assert head.draft_ids is not None
    for ids in (
        None,
        head.draft_ids[:-1],
        head.draft_ids.to(torch.int32),
        head.draft_ids + 64,
        torch.zeros(32, dtype=torch.int64),
    ):
        refused(replace(head, draft_ids=ids), folder, ModelFileError, "32 different int64 ids")
    whole = replace(make_head(HEADS["eagle1"]), draft_ids=torch.arange(64))
    refused(whole, folder, ModelFileError, "None where both vocabularies are the same")


def test_what_must_be_said(tmp_path: Path) -> None:
    folder, head = tmp_path / "head", make_head(HEADS["eagle3"])
    refused(head, folder, ConfigError, "num_speculative_tokens=0", num_speculative_tokens=0)
    refused(head, folder, ConfigError, "name the target", verifier="")
    refused(head, folder, ConfigError, "name the target", architectures=[])


def test_what_sglang_ignores_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="forerun"):
        save(make_head(HEADS["eagle3"]), tmp_path / "plain")
        assert not caplog.records
        save(make_head(HEADS["eagle3 qwen3"]), tmp_path / "qwen3")
    assert "SGLang ignores them" in caplog.text


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    head = make_head(HEADS["medusa"])
    folder = save(head, tmp_path / "deep" / "head")
    with pytest.raises(ConfigError, match="is there already"):
        save(head, folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is there already"):
        save(head, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert same_head(open_head(save(head, tmp_path / "empty"), TARGET), head)


def test_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forerun.heads.writer.save_file", full)
    refused(make_head(HEADS["medusa"]), tmp_path / "head", ConfigError, "No space left")


def test_files_are_as_public_as_others(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        folder = save(make_head(HEADS["medusa"]), tmp_path / "head")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
