"""Every family against transformers: tiny random models in float32, whole, chunked, batched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from reference.tiny_models import (
    Altered,
    make_decoder,
    random_prompt,
    reference_logits,
    run_decoder,
    save_tiny_model,
)
from torch import Tensor

from forerun.model.arch import ModelConfig, RopeConfig
from forerun.model.loader import ModelFiles, open_model

TOLERANCE = 1e-4
VISIBLE = 1e-2  # what a mistake in the maths moves logits by, at the least
LENGTHS = (1, 2, 31, 32, 33, 100, 300)
CHUNKS = [(7,), (32,), (33, 64), (100,), (248, *[1] * 12)]
BATCHES = [None, (5, 64, 1, 33, 17, 100), (90, 3)]
KERNELS = ["torch", "numba", "compiled"]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama-16-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-32-tied": ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama-32-mha": ("llama", {"head_dim": 32, "num_key_value_heads": 4}),
    "llama-64-bias": ("llama", {"head_dim": 64, "attention_bias": True}),
    "llama-32-llama3": ("llama", {"head_dim": 32, "rope_parameters": LLAMA3}),
    "llama-64-linear": ("llama", {"head_dim": 64, "rope_parameters": LINEAR}),
    "llama-128-one-kv": ("llama", {"head_dim": 128, "num_key_value_heads": 1}),
    "llama-96-share-3": (
        "llama",
        {
            "head_dim": 96,
            "hidden_size": 66,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
    "mistral-16-window": ("mistral", {"sliding_window": 24}),
    "mistral-32-window": ("mistral", {"head_dim": 32, "sliding_window": 24}),
    "mistral-64-window": ("mistral", {"head_dim": 64, "sliding_window": 65}),
    "mistral-32-window-1": ("mistral", {"head_dim": 32, "sliding_window": 1}),
    "mistral-32-no-window": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2-32-tied": (
        "qwen2",
        {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen2-16": ("qwen2", {}),
    "qwen2-32-window": (
        "qwen2",
        {
            "num_attention_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    "qwen3-32": ("qwen3", {"head_dim": 32, "hidden_size": 48}),
    "qwen3-128-tied": ("qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    "qwen3-64-bias": ("qwen3", {"head_dim": 64, "attention_bias": True}),
    "qwen3-32-window": (
        "qwen3",
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 50,
            "max_window_layers": 2,
        },
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Spare tiny matrices the waking of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    files: ModelFiles
    prompts: list[list[int]]
    expected: list[Tensor]  # [T, V] each


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @cache
    def loaded(name: str) -> Case:
        family, options = CASES[name]
        folder = tmp_path_factory.mktemp(name)
        model = save_tiny_model(folder, family, **options)
        prompts = [random_prompt(length, seed=length) for length in LENGTHS]
        expected = [reference_logits(model, prompt) for prompt in prompts]
        return Case(open_model(folder), prompts, expected)

    return loaded


def kernel_cases() -> list[Any]:
    return [
        pytest.param(name, kernels, id=f"{name}-{kernels}")
        for name in CASES
        for kernels in KERNELS
        if kernels == "torch" or "-16" not in name
        if kernels != "compiled" or CASES[name][1].get("hidden_size", 64) % 16 == 0
    ]


def differences(found: list[Tensor], expected: list[Tensor]) -> float:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == torch.float32
    pairs = zip(found, expected, strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize(("name", "kernels"), kernel_cases())
def test_logits_equal_those_of_transformers(load, name, kernels):
    case = load(name)
    decoder = make_decoder(case.files.config, case.files.weights, kernels)
    assert decoder.kernels == kernels
    worst = 0.0
    for prompt, expected in zip(case.prompts, case.expected, strict=True):
        worst = max(worst, differences(run_decoder(decoder, [prompt]), [expected]))
    for chunks in CHUNKS:
        found = run_decoder(decoder, [case.prompts[-1]], chunks, seed=chunks[0])
        worst = max(worst, differences(found, [case.expected[-1]]))
    for seed, batch_chunks in enumerate(BATCHES):
        found = run_decoder(decoder, case.prompts, batch_chunks, seed=seed)
        worst = max(worst, differences(found, case.expected))
    assert worst < TOLERANCE


@pytest.mark.parametrize("block_size", [2, 8, 16, 64, 256])
def test_other_block_sizes_run_on_torch(load, block_size):
    case = load("mistral-32-window")
    decoder = make_decoder(case.files.config, case.files.weights, "auto", block_size=block_size)
    assert decoder.kernels == "torch"
    found = run_decoder(decoder, case.prompts, (33, 64, 7), block_size=block_size)
    assert differences(found, case.expected) < TOLERANCE


def other_windows(config: ModelConfig, change: Callable[[int], int | None]) -> ModelConfig:
    windows = tuple(each and change(each) for each in config.sliding_windows)
    return replace(config, sliding_windows=windows)


def zeroed(suffix: str) -> Callable[[str, Tensor], Tensor]:
    return lambda name, tensor: tensor * 0 if name.endswith(suffix) else tensor


def flattened(suffix: str) -> Callable[[str, Tensor], Tensor]:
    return lambda name, tensor: tensor * 0 + 1 if name.endswith(suffix) else tensor


CONFIG_MISTAKES: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig]]] = {
    "theta": ("llama-32-mha", lambda c: replace(c, rope=RopeConfig(c.rope.theta * 2))),
    "llama3 scaling forgotten": (
        "llama-32-llama3",
        lambda c: replace(c, rope=RopeConfig(c.rope.theta)),
    ),
    "linear scaling forgotten": (
        "llama-64-linear",
        lambda c: replace(c, rope=RopeConfig(c.rope.theta)),
    ),
    "window forgotten": ("mistral-32-window", lambda c: other_windows(c, lambda w: None)),
    "window one too wide": ("mistral-32-window", lambda c: other_windows(c, lambda w: w + 1)),
    "window one too narrow": ("mistral-64-window", lambda c: other_windows(c, lambda w: w - 1)),
    "window on every layer": (
        "qwen2-32-window",
        lambda c: replace(c, sliding_windows=(20,) * c.num_layers),
    ),
    "window off by a layer": (
        "qwen3-32-window",
        lambda c: replace(c, sliding_windows=(None, 50, 50)),
    ),
    "head norms forgotten": ("qwen3-32", lambda c: replace(c, qk_norm=False)),
    "biases forgotten": ("qwen2-16", lambda c: replace(c, qkv_bias=False)),
    "output bias forgotten": ("llama-64-bias", lambda c: replace(c, o_bias=False)),
    "head tied by mistake": ("llama-32-mha", lambda c: replace(c, tie_embeddings=True)),
}


@pytest.mark.parametrize("mistake", CONFIG_MISTAKES)
def test_a_mistake_in_the_config_is_seen(load, mistake):
    name, change = CONFIG_MISTAKES[mistake]
    case = load(name)
    decoder = make_decoder(change(case.files.config), case.files.weights, "auto")
    assert differences(run_decoder(decoder, case.prompts), case.expected) > VISIBLE


WEIGHT_MISTAKES = {
    "input norm": ("llama-32-mha", flattened("input_layernorm.weight")),
    "final norm": ("llama-32-mha", flattened("model.norm.weight")),
    "query norm": ("qwen3-32", flattened("q_norm.weight")),
    "key norm": ("qwen3-32", flattened("k_norm.weight")),
    "query bias": ("qwen2-16", zeroed("q_proj.bias")),
    "value bias": ("qwen2-16", zeroed("v_proj.bias")),
}


@pytest.mark.parametrize("mistake", WEIGHT_MISTAKES)
def test_a_mistake_in_the_weights_is_seen(load, mistake):
    name, change = WEIGHT_MISTAKES[mistake]
    case = load(name)
    decoder = make_decoder(case.files.config, Altered(case.files.weights, change), "auto")
    assert differences(run_decoder(decoder, case.prompts), case.expected) > VISIBLE
