"""What is no head for this target is refused, with the numbers and a way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference.tiny_heads import (
    TARGET,
    eagle1_original,
    eagle3_original,
    eagle3_speculators,
    eagle3_vllm,
    eagle_config,
    edit_config,
    edit_tensors,
    make_head,
    medusa_config,
    medusa_original,
    medusa_vllm,
    write,
)
from torch import Tensor

from forerun.errors import ModelFileError, ModelNotFound, UnsupportedModel
from forerun.heads.loader import open_head

Q = "layers.0.self_attn.q_proj.weight"


@pytest.fixture
def medusa(tmp_path: Path) -> Path:
    return medusa_original(tmp_path / "medusa", make_head(medusa_config(TARGET)))


def refused(folder: Path, kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as caught:
        open_head(folder, TARGET)
    message = str(caught.value)
    assert str(folder) in message
    for word in words:
        assert word in message


CONFIGS: list[tuple[dict, type[Exception], list[str]]] = [
    ({"vocab_size": 65}, UnsupportedModel, ["65", "64", "trained for"]),
    ({"target_hidden_size": 48}, UnsupportedModel, ["48", "32", "trained for"]),
    ({"num_attention_heads": 5}, ModelFileError, ["num_heads=5", "num_kv_heads=2"]),
    ({"hidden_size": 40}, UnsupportedModel, ["40", "32", "lacks its own"]),
    ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, UnsupportedModel, ["9", "8 layers"]),
    ({"eagle_aux_hidden_state_layer_ids": [-1, 4, 5]}, UnsupportedModel, ["-1", "8 layers"]),
    ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, UnsupportedModel, ["96", "2 x 32"]),
    ({"eagle_aux_hidden_state_layer_ids": "2"}, ModelFileError, ["list of layer numbers"]),
    ({"eagle_aux_hidden_state_layer_ids": [True, 2, 3]}, ModelFileError, ["list of layer"]),
    ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedModel, ["use_aux_hidden"]),
    ({"draft_vocab_size": 65}, ModelFileError, ["65", "1..64"]),
    ({"draft_vocab_size": 0}, ModelFileError, ["1..64"]),
    ({"draft_vocab_size": 31}, ModelFileError, ["d2t", "[32]", "[31]"]),
    ({"num_key_value_heads": 4}, ModelFileError, ["k_proj", "[16, 64]", "[32, 64]"]),
    ({"intermediate_size": 50}, ModelFileError, ["[48, 32]", "[50, 32]"]),
    ({"norm_before_residual": 1}, ModelFileError, ["true or false"]),
    ({"norm_before_fc": True}, ModelFileError, ["norm_before_fc=true", "missing"]),
    ({"fc_norm": True}, ModelFileError, ["fc_norm=true", "missing"]),
    ({"attention_bias": True}, ModelFileError, ["3 of the head's tensors", "layer.q.bias"]),
    ({"model_type": "qwen3"}, ModelFileError, ["qwen3", "model_type='llama'"]),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, UnsupportedModel, ["yarn"]),
    ({"hidden_act": "gelu"}, UnsupportedModel, ["gelu", "silu"]),
    ({"layer_types": ["linear_attention"]}, UnsupportedModel, ["linear_attention"]),
    ({"layer_types": ["sliding_attention"]}, ModelFileError, ["sliding_window"]),
    ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModel, ["awq", "unquantised"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "words"), CONFIGS, ids=lambda value: str(value)[:50])
def test_configurations(
    eagle3: Path, changes: dict, kind: type[Exception], words: list[str]
) -> None:
    open_head(eagle3, TARGET)  # what is refused below is the change alone
    refused(edit_config(eagle3, **changes), kind, *words)


def test_missing_field(eagle3: Path) -> None:
    refused(edit_config(eagle3, remove=("rms_norm_eps",)), ModelFileError, "rms_norm_eps")


def put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: value})


def spoil(name: str, value: float) -> Callable[[dict[str, Tensor]], object]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[7] = value

    return change


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def twice(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.q_proj.weight"] = tensors[Q] + 1


def first_twice(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def ids_for_offsets(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += torch.arange(32)


TENSORS: list[tuple[Callable[[dict[str, Tensor]], object], type[Exception], list[str]]] = [
    (drop("fc.weight"), UnsupportedModel, ["no draft head", "by its tensors"]),
    (drop(Q), ModelFileError, ["1 of the head's tensors", "layer.q.weight"]),
    (drop("norm.weight"), ModelFileError, ["norm.weight"]),
    (drop("layers.0.hidden_norm.weight"), ModelFileError, ["hidden_norm.weight"]),
    (drop("d2t"), ModelFileError, ["32 of 64", "d2t"]),
    (put(Q, torch.ones(32, 32)), ModelFileError, ["[32, 32]", "[32, 64]"]),
    (put("fc.weight", torch.ones(32, 64)), UnsupportedModel, ["64", "3 x 32", "another target"]),
    (put("lm_head.weight", torch.ones(64, 32)), ModelFileError, ["[64, 32]", "[32, 32]"]),
    (put("layers.1.mlp.up_proj.weight", torch.ones(2)), UnsupportedModel, ["2 decoder layers"]),
    (put("something.else", torch.ones(2)), UnsupportedModel, ["1 tensors", "something.else"]),
    (put("norm.bias", torch.ones(32)), UnsupportedModel, ["norm.bias"]),
    (put("layers.0.self_attn.k_proj.bias", torch.ones(16)), UnsupportedModel, ["k_proj.bias"]),
    (put("fc_norm.3.weight", torch.ones(32)), ModelFileError, ["fc_norm.0.weight"]),
    (
        lambda tensors: tensors.update(
            {"input_norm.weight": torch.ones(96), "fc_norm.0.weight": torch.ones(32)}
        ),
        UnsupportedModel,
        ["input_norm", "fc_norm"],
    ),
    (spoil(Q, float("nan")), ModelFileError, [Q, "NaN"]),
    (spoil("lm_head.weight", float("inf")), ModelFileError, ["lm_head.weight", "NaN or inf"]),
    (twice, ModelFileError, ["midlayer.self_attn.q_proj.weight", Q, "differ"]),
    (spoil("d2t", 1000), ModelFileError, ["d2t", "0..63", "1007", "offsets"]),
    (spoil("d2t", -100), ModelFileError, ["d2t", "0..63", "-93"]),
    (first_twice, ModelFileError, ["d2t", "more than once"]),
    (ids_for_offsets, ModelFileError, ["d2t", "not the target's ids"]),
    (put("d2t", torch.zeros(32)), ModelFileError, ["F32", "I64 [32]"]),
    (put(Q, torch.ones(32, 64, dtype=torch.int8)), UnsupportedModel, ["I8", "BF16"]),
    (put(Q, torch.ones(32, 64, dtype=torch.float64)), UnsupportedModel, ["F64", "F32"]),
    (put(Q + "_scale", torch.ones(1)), UnsupportedModel, ["quantised", "unquantised"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "words"), TENSORS, ids=map(str, range(len(TENSORS))))
def test_tensors(
    eagle3: Path,
    change: Callable[[dict[str, Tensor]], object],
    kind: type[Exception],
    words: list[str],
) -> None:
    refused(edit_tensors(eagle3, change), kind, *words)


def test_a_map_that_reorders_everything(tmp_path: Path) -> None:
    folder = eagle3_vllm(tmp_path / "head", make_head(eagle_config(TARGET, 3, draft_vocab_size=64)))
    order = torch.arange(64).flip(0)
    edit_tensors(folder, put("d2t", order - torch.arange(64)))
    refused(folder, ModelFileError, "reorders all 64")


def test_default_layers_of_a_target_too_shallow_for_them(tmp_path: Path) -> None:
    folder = eagle3_original(tmp_path / "head", make_head(eagle_config(TARGET, 3)))
    shallow = replace(TARGET, num_layers=2, sliding_windows=(None,) * 2)
    with pytest.raises(UnsupportedModel, match=r"\[2, 1, -1\].*2 layers.*name none"):
        open_head(folder, shallow)


def test_more_layers_by_speculators_own_field(tmp_path: Path) -> None:
    folder = eagle3_speculators(tmp_path / "head", make_head(eagle_config(TARGET, 3)))
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    edit_config(folder, transformer_layer_config={**layer, "num_hidden_layers": 2})
    refused(folder, UnsupportedModel, "2 decoder layers")


def test_eagle1_for_another_hidden_size(tmp_path: Path) -> None:
    other = replace(TARGET, hidden_size=40, num_heads=5, num_kv_heads=5)
    folder = eagle1_original(tmp_path / "head", make_head(eagle_config(other, 1)))
    refused(folder, UnsupportedModel, "40", "32", "trained for")


def test_eagle1_whose_bias_is_promised(tmp_path: Path) -> None:
    folder = eagle1_original(tmp_path / "head", make_head(eagle_config(TARGET, 1)))
    refused(edit_tensors(folder, drop("fc.bias")), ModelFileError, "fc.bias")


def test_eagle1_with_norms_of_hass(tmp_path: Path) -> None:
    folder = eagle1_original(tmp_path / "head", make_head(eagle_config(TARGET, 1)))
    edit_tensors(folder, put("embed_layernorm.weight", torch.ones(32)))
    refused(folder, UnsupportedModel, "embed_layernorm.weight")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"speculators_model_type": "dflash"}, "DFlash"),
        ({"speculators_model_type": "dspark"}, "DSpark"),
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"speculators_model_type": "mtp"}, "MTP"),
        ({"speculators_model_type": "telepathy"}, "'telepathy'"),
        ({"speculators_config": {"algorithm": "telepathy"}}, "'telepathy'"),
        ({"model_type": "mlp_speculator", "n_predict": 3}, "MLP speculator"),
        ({"architectures": ["DFlashDraftModel"]}, "DFlash"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "MLP speculator"),
        ({"parallel_drafting": True}, "P-EAGLE"),
    ],
    ids=str,
)
def test_other_kinds_are_refused_by_name(eagle3: Path, config: dict, name: str) -> None:
    refused(edit_config(eagle3, **config), UnsupportedModel, name, "supported: Medusa, EAGLE-1")


@pytest.mark.parametrize(
    ("tensor", "name"),
    [("mask_hidden", "P-EAGLE"), ("speculator.emb.0.weight", "MLP speculator")],
)
def test_other_kinds_by_their_tensors(eagle3: Path, tensor: str, name: str) -> None:
    refused(edit_tensors(eagle3, put(tensor, torch.ones(1))), UnsupportedModel, name)


MEDUSA: list[tuple[Callable[[dict[str, Tensor]], object], type[Exception], list[str]]] = [
    (drop("1.0.linear.weight"), ModelFileError, ["heads.1.blocks.0.weight"]),
    (
        lambda tensors: [tensors.pop(f"1.0.linear.{kind}") for kind in ("weight", "bias")],
        ModelFileError,
        ["head 1 of 3", "0 blocks", "expected 1"],
    ),
    (drop("2.1.weight"), ModelFileError, ["heads.2.out.weight"]),
    (drop("1.0.linear.bias"), ModelFileError, ["heads.1.blocks.0.bias"]),
    (put("9000000000.0.linear.weight", torch.ones(1)), ModelFileError, ["head 3 of 9000000001"]),
    (put("0.9000000000.linear.weight", torch.ones(1)), ModelFileError, ["head 0", "2 blocks"]),
    (put("0.1.weight", torch.ones(60, 32)), UnsupportedModel, ["60", "64", "token_map"]),
    (put("1.1.weight", torch.ones(60, 32)), ModelFileError, ["[60, 32]", "[64, 32]"]),
    (put("0.0.linear.weight", torch.ones(40, 40)), UnsupportedModel, ["40", "32"]),
    (put("lm_head.weight", torch.ones(64, 32)), UnsupportedModel, ["shared", "3 heads"]),
    (put("token_map", torch.tensor([1, 1])), ModelFileError, ["token_map", "more than once"]),
    (put("token_map", torch.tensor([1, 64])), ModelFileError, ["token_map", "0..63", "64"]),
    (put("model.layers.5.mlp.up_proj.weight", torch.ones(1)), UnsupportedModel, ["layers.5"]),
    (put("medusa_head.0.1.weight", torch.ones(64, 32)), ModelFileError, ["are one tensor"]),
    (
        lambda tensors: tensors.update({"0.2.weight": tensors.pop("0.1.weight")}),
        ModelFileError,
        ["head 0", "at 2", "after its 1 blocks"],
    ),
    (spoil("0.0.linear.weight", float("nan")), ModelFileError, ["0.0.linear.weight", "NaN"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "words"), MEDUSA, ids=map(str, range(len(MEDUSA))))
def test_medusa_tensors(
    medusa: Path,
    change: Callable[[dict[str, Tensor]], object],
    kind: type[Exception],
    words: list[str],
) -> None:
    open_head(medusa, TARGET)
    refused(edit_tensors(medusa, change), kind, *words)


def test_medusa_for_another_vocabulary(tmp_path: Path) -> None:
    folder = medusa_vllm(tmp_path / "head", make_head(medusa_config(TARGET)))
    refused(edit_config(folder, vocab_size=70), UnsupportedModel, "70", "64")
    refused(edit_config(folder, vocab_size=64, truncated_vocab_size=9), ModelFileError, "9", "64")


def test_no_folder_no_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nothing there"):
        open_head(tmp_path / "no", TARGET)
    with pytest.raises(ModelFileError, match="no weights"):
        open_head(tmp_path, TARGET)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match="a file; expected a folder"):
        open_head(tmp_path / "model.gguf", TARGET)


def test_pickles_are_for_convert(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80")
    for path in (tmp_path, tmp_path / "medusa_lm_head.pt"):
        with pytest.raises(UnsupportedModel, match=r"medusa_lm_head\.pt.*forerun convert"):
            open_head(path, TARGET)


def test_files_that_are_damaged(eagle3: Path) -> None:
    weights = eagle3 / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-10], whole[:5], b"", b"\x00" * 100):
        weights.write_bytes(damaged)
        refused(eagle3, ModelFileError, "model.safetensors")
    weights.write_bytes(whole)
    (eagle3 / "config.json").write_text("[1]")
    refused(eagle3, ModelFileError, "config.json")
    (eagle3 / "config.json").unlink()
    refused(eagle3, ModelFileError, "config.json", "missing")


def test_shards_that_contradict(tmp_path: Path) -> None:
    head = make_head(eagle_config(TARGET, 1))
    folder = eagle1_original(tmp_path / "head", head)
    copy = write(tmp_path / "copy", {}, {"fc.bias": torch.ones(32)})
    (copy / "model.safetensors").rename(folder / "other.safetensors")
    refused(folder, ModelFileError, "other.safetensors", "fc.bias")
    index = {"weight_map": {"fc.bias": "other.safetensors", "norm": "other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, ModelFileError, "1 tensors", "norm")
    index = {"weight_map": {"fc.bias": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, ModelFileError, "../other.safetensors", "file name")
