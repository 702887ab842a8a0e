"""Heads in every layout that is found in the wild are read as the heads that they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference.tiny_heads import (
    LAYOUTS,
    TARGET,
    VERIFIER,
    eagle1_original,
    eagle3_original,
    eagle3_specforge,
    eagle3_speculators,
    eagle3_vllm,
    eagle_config,
    edit_config,
    edit_tensors,
    make_head,
    medusa_config,
    medusa_original,
    medusa_vllm,
    same_head,
)
from safetensors.torch import load_file, save_file

from forerun.heads.config import EagleConfig
from forerun.heads.loader import open_head
from forerun.model.arch import Llama3Scaling, RopeConfig

PLAIN = {
    "eagle1": eagle_config(TARGET, 1),
    "eagle3": eagle_config(TARGET, 3),
    "medusa": medusa_config(TARGET),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, layout) for kind in LAYOUTS for layout in LAYOUTS[kind]]
)
def test_every_layout(tmp_path: Path, kind: str, layout: str, dtype: torch.dtype) -> None:
    head = make_head(PLAIN[kind], dtype=dtype)
    found = open_head(LAYOUTS[kind][layout](tmp_path / "head", head), TARGET)
    assert same_head(found, head)
    assert found.notes == ()


@pytest.mark.parametrize(
    "options",
    [
        {"norm_before_residual": True},
        {"norm_before_fc": "one"},
        {"norm_before_fc": "each"},
        {"norm_output": True, "norm_before_fc": "each"},
        {"own_embeddings": True},
        {"draft_vocab_size": 64, "own_head": False},
        {"own_head": False},
        {"feature_layers": (1, 3, 5, 8)},
        {"layer_options": {"family": "qwen3", "qk_norm": True}},
        {"layer_options": {"qkv_bias": True}},
        {"layer_options": {"qkv_bias": True, "o_bias": True}},
        {"layer_options": {"num_heads": 2, "head_size": 16}},
        {"layer_options": {"max_positions": 4096}},
    ],
    ids=str,
)
def test_variants_of_eagle3(tmp_path: Path, options: dict) -> None:
    head = make_head(eagle_config(TARGET, 3, **options))
    found = open_head(eagle3_speculators(tmp_path / "head", head), TARGET)
    assert same_head(found, head)
    assert found.notes == ()


def test_what_the_speculators_format_says_around_the_head(tmp_path: Path) -> None:
    found = open_head(eagle3_speculators(tmp_path / "head", make_head(PLAIN["eagle3"])), TARGET)
    assert (found.verifier, found.num_speculative_tokens) == (VERIFIER, 5)
    found = open_head(medusa_original(tmp_path / "medusa", make_head(PLAIN["medusa"])), TARGET)
    assert (found.verifier, found.num_speculative_tokens) == (VERIFIER, None)


def test_eagle1_with_norms_and_tensors_of_its_own(tmp_path: Path) -> None:
    config = eagle_config(
        TARGET, 1, input_norm=True, output_norm=True, own_embeddings=True, own_head=True,
        fc_bias=False,
    )  # fmt: skip
    head = make_head(config)
    assert same_head(open_head(eagle1_original(tmp_path / "head", head), TARGET), head)


def test_eagle1_of_a_qwen2_target(tmp_path: Path) -> None:
    head = make_head(eagle_config(TARGET, 1, layer_options={"qkv_bias": True}))
    folder = edit_config(
        eagle1_original(tmp_path / "head", head), model_type="qwen2",
        architectures=["Qwen2ForCausalLM"], remove=("attention_bias",),
    )  # fmt: skip
    found = open_head(folder, TARGET)
    assert same_head(found, head)
    assert found.notes == ()


def test_a_head_wider_than_its_target(tmp_path: Path) -> None:
    head = make_head(
        eagle_config(
            TARGET, 3, own_embeddings=True, layer_options={"hidden_size": 40, "num_heads": 5,
            "num_kv_heads": 5},
        )
    )  # fmt: skip
    assert head.weights["fc.weight"].shape == (40, 96)
    assert same_head(open_head(eagle3_specforge(tmp_path / "head", head), TARGET), head)


def test_rotary_scaling_in_both_spellings(tmp_path: Path) -> None:
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 64)
    rope = RopeConfig(5e5, scaling)
    head = make_head(eagle_config(TARGET, 3, layer_options={"rope": rope}))
    spelt = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = edit_config(eagle3_vllm(tmp_path / "old", head), rope_scaling=spelt)
    new = edit_config(
        eagle3_vllm(tmp_path / "new", head), rope_parameters={**spelt, "rope_theta": 5e5},
        remove=("rope_theta",),
    )  # fmt: skip
    for folder in (old, new):
        assert same_head(open_head(folder, TARGET), head)


def test_a_sliding_window(tmp_path: Path) -> None:
    head = make_head(eagle_config(TARGET, 3, layer_options={"sliding_windows": (16,)}))
    folder = edit_config(
        eagle3_vllm(tmp_path / "head", head), layer_types=["sliding_attention"], sliding_window=16
    )
    assert same_head(open_head(folder, TARGET), head)
    edit_config(folder, layer_types=["full_attention"])
    config = open_head(folder, TARGET).config
    assert isinstance(config, EagleConfig)
    assert config.layer.sliding_windows == (None,)


def test_head_size_that_only_the_tensors_tell(tmp_path: Path) -> None:
    head = make_head(eagle_config(TARGET, 3, layer_options={"num_heads": 2, "head_size": 6}))
    folder = edit_config(eagle3_vllm(tmp_path / "head", head), remove=("head_dim",))
    assert same_head(open_head(folder, TARGET), head)


@pytest.mark.parametrize("indexed", [True, False])
def test_several_shards(tmp_path: Path, indexed: bool) -> None:
    head = make_head(PLAIN["eagle3"])
    folder = eagle3_original(tmp_path / "head", head)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    if indexed:
        weight_map = {name: file for file, part in files.items() for name in part}

        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    assert same_head(open_head(folder, TARGET), head)


def test_a_vocabulary_map_that_maps_nothing(tmp_path: Path) -> None:
    head = make_head(eagle_config(TARGET, 3, draft_vocab_size=64))
    folder = edit_tensors(
        eagle3_original(tmp_path / "head", head),
        lambda tensors: tensors.update(
            d2t=torch.zeros(64, dtype=torch.int64), t2d=torch.ones(64, dtype=torch.bool)
        ),
    )
    assert open_head(folder, TARGET).draft_ids is None


def test_draft_ids_are_absolute_and_keep_their_order(tmp_path: Path) -> None:
    head = make_head(PLAIN["eagle3"])
    assert head.draft_ids is not None
    head = replace(head, draft_ids=head.draft_ids.flip(0))
    found = open_head(eagle3_original(tmp_path / "head", head), TARGET)
    assert found.draft_ids is not None
    assert found.draft_ids.dtype == torch.int64
    assert found.draft_ids.tolist() == head.draft_ids.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 1},
        {"num_blocks": 2},
        {"block_bias": False},
        {"shared_head": True},
        {"draft_vocab_size": 20},
        {"draft_vocab_size": 20, "shared_head": True},
        {"own_head": False, "shared_head": True},
        {"own_head": False, "shared_head": True, "draft_vocab_size": 20},
    ],
    ids=str,
)
def test_variants_of_medusa(tmp_path: Path, options: dict) -> None:
    head = make_head(medusa_config(TARGET, **options))
    found = open_head(medusa_vllm(tmp_path / "head", head), TARGET)
    assert same_head(found, head)
    assert found.notes == ()


def test_medusa_without_projections_uses_the_targets(tmp_path: Path) -> None:
    head = make_head(medusa_config(TARGET, own_head=False, shared_head=True))
    assert same_head(open_head(medusa_original(tmp_path / "head", head), TARGET), head)


def test_medusa_counts_the_heads_it_finds(tmp_path: Path) -> None:
    head = make_head(medusa_config(TARGET, num_heads=5))
    folder = edit_config(medusa_original(tmp_path / "head", head), medusa_num_heads=2)
    found = open_head(folder, TARGET)
    assert same_head(found, head)
    assert found.notes == ("config.json says medusa_num_heads=2, the files hold 5 heads",)


def test_medusa_with_one_original_projection(tmp_path: Path) -> None:
    head = make_head(medusa_config(TARGET, shared_head=True))
    folder = edit_tensors(
        medusa_vllm(tmp_path / "head", head),
        lambda tensors: tensors.update({"lm_heads.0.weight": tensors.pop("lm_head.weight")}),
    )
    assert same_head(open_head(folder, TARGET), head)


def test_medusa_cuts_whole_projections_to_its_vocabulary(tmp_path: Path) -> None:
    whole = make_head(medusa_config(TARGET))
    ids = torch.tensor([5, 3, 60])
    folder = edit_config(medusa_vllm(tmp_path / "head", whole), truncated_vocab_size=3)
    edit_tensors(folder, lambda tensors: tensors.update(token_map=ids))
    found = open_head(folder, TARGET)
    assert found.config == medusa_config(TARGET, draft_vocab_size=3)
    assert found.draft_ids is not None
    assert found.draft_ids.tolist() == [5, 3, 60]
    for index in range(3):
        name = f"heads.{index}.out.weight"
        assert torch.equal(found.weights[name], whole.weights[name][ids])


def test_medusa_of_speculators_has_offsets(tmp_path: Path) -> None:
    head = make_head(medusa_config(TARGET, draft_vocab_size=20))
    assert head.draft_ids is not None
    offsets = head.draft_ids - torch.arange(20)

    def rename(tensors: dict) -> None:
        del tensors["token_map"]
        tensors["d2t"] = offsets

    folder = edit_tensors(medusa_vllm(tmp_path / "head", head), rename)
    edit_config(
        folder, speculators_model_type="medusa", medusa_hidden_size=32, medusa_vocab_size=64,
        remove=("hidden_size", "vocab_size", "model_type"),
    )  # fmt: skip
    assert same_head(open_head(folder, TARGET), head)
