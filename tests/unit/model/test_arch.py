"""Configurations: what is read, what is refused, and rotary frequencies against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forerun.errors import ModelFileError, UnsupportedModel
from forerun.model.arch import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    expected_shapes,
    rope_frequencies,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_act": "silu", **SIZES}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes})


def test_both_spellings_of_the_rotation_mean_the_same():
    old = read(rope_theta=500_000.0, rope_scaling=LLAMA3)
    new = read(rope_parameters={"rope_theta": 500_000.0, **LLAMA3})
    assert old == new
    assert old.rope.theta == 500_000.0
    assert old.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    linear = read(rope_scaling={"type": "linear", "factor": 2.0})
    assert linear.rope.scaling == LinearScaling(2.0)
    assert linear.rope.theta == 10_000.0


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model_type", "gemma2", "'gemma2'; supported: llama"),
        ("hidden_act", "gelu", "hidden_act='gelu'"),
        ("mlp_bias", True, "mlp_bias=True"),
        ("quantization_config", {"quant_method": "gptq"}, "'gptq'"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "'yarn'; supported: default"),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 4.0}, "'dynamic'"),
        ("rope_parameters", {"full_attention": {"rope_theta": 1.0}}, "per layer type"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor=0.5"),
    ],
)
def test_other_maths_is_refused_by_name(field, value, said):
    with pytest.raises(UnsupportedModel, match="supported") as caught:
        read(**{field: value})
    assert said in str(caught.value)


@pytest.mark.parametrize("field", [*SIZES, "model_type"])
def test_a_missing_field_is_named(field):
    if field == "num_key_value_heads":
        assert read(num_key_value_heads=None).num_kv_heads == 4
        return
    with pytest.raises(ModelFileError, match=field):
        ModelConfig.from_hf({key: value for key, value in LLAMA.items() if key != field})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "32"),
        ("vocab_size", True),
        ("rms_norm_eps", 0.0),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("tie_word_embeddings", "yes"),
        ("rope_scaling", "llama3"),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {**LLAMA3, "high_freq_factor": 1.0}),
        ("eos_token_id", "2"),
    ],
)
def test_a_nonsensical_field_is_refused(field, value):
    with pytest.raises(ModelFileError):
        read(**{field: value})


def test_end_tokens_are_the_union_of_both_files():
    config = ModelConfig.from_hf(
        {**LLAMA, "bos_token_id": 1, "eos_token_id": 2}, {"eos_token_id": [5, 2], "bos_token_id": 9}
    )
    assert config.eos_token_ids == (5, 2)
    assert config.bos_token_id == 1
    assert read().eos_token_ids == ()
    assert read().bos_token_id is None


def windows(model_type: str, **changes: Any) -> tuple[int | None, ...]:
    return ModelConfig.from_hf({**LLAMA, "model_type": model_type, **changes}).sliding_windows


def test_sliding_windows_of_each_family():
    assert windows("llama", sliding_window=8) == (None,) * 3
    assert windows("mistral", sliding_window=8) == (8,) * 3
    assert windows("mistral", sliding_window=None) == (None,) * 3
    assert windows("mistral") == (4096,) * 3
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert windows("qwen2", sliding_window=8) == (None,) * 3
    assert windows("qwen2", **on, max_window_layers=1) == (None, 8, 8)
    assert windows("qwen2", **on) == (None,) * 3  # the first 28 layers are full
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows("qwen3", **on, layer_types=types) == (8, None, 8)
    with pytest.raises(ModelFileError, match="2 layer types for 3 layers"):
        windows("qwen3", **on, layer_types=types[:2])
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        windows("qwen3", **on, layer_types=["chunked_attention"] * 3)


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
def test_shapes_and_counts_are_those_of_transformers(family, tied):
    config_class, model_class = CLASSES[family]
    options = {**SIZES, "tie_word_embeddings": tied}
    if family in ("llama", "qwen3"):
        options |= {"head_dim": 16, "attention_bias": True}
    theirs = config_class(**options)
    ours = ModelConfig.from_hf(theirs.to_dict())
    with torch.device("meta"):
        model = model_class(theirs)
    named = {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert expected_shapes(ours) == named
    assert ours.num_parameters == sum(each.numel() for each in model.parameters())
    assert ours.kv_bytes_per_token(2) == 2 * 3 * 2 * ours.head_size * 2


@pytest.mark.parametrize("scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 3.0}], ids=str)
@pytest.mark.parametrize("theta", [10_000.0, 100_000.0])
def test_rotary_frequencies_have_the_bits_of_transformers(scaling, theta):
    parameters = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    theirs = transformers.LlamaConfig(**SIZES, head_dim=64, rope_parameters=dict(parameters))
    if scaling is None:
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
        expected = rotary.inv_freq
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, None)
        assert factor == 1.0
    ours = rope_frequencies(ModelConfig.from_hf(theirs.to_dict()))
    assert ours.dtype == torch.float32
    assert torch.equal(ours, expected)
