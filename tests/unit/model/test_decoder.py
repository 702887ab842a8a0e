"""The decoder beyond its maths: weights it refuses, kernels it chooses, rows that stand alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.tiny_models import (
    VOCAB,
    Altered,
    Harness,
    make_decoder,
    random_prompt,
    run_decoder,
    save_tiny_model,
)
from torch import Tensor

from forerun.device import has_fast_bf16
from forerun.errors import ConfigError, ModelFileError
from forerun.model import decoder as decoder_module
from forerun.model.arch import ModelConfig
from forerun.model.decoder import choose_kernels
from forerun.model.loader import ModelFiles, open_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FAST_BF16 = has_fast_bf16(CPU)
NEEDS_BF16 = pytest.mark.skipif(
    not FAST_BF16, reason="no AMX or AVX512-BF16: rows of a bfloat16 product depend on their number"
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"hidden_size": 192, "intermediate_size": 512, "head_dim": 64}),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": 40}),
    "qwen2": ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return make_files(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return make_files(tmp_path_factory.mktemp("one-llama"), "llama")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Spare tiny matrices the waking of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_files(folder: Path, family: str) -> ModelFiles:
    name, options = FAMILIES[family]
    save_tiny_model(folder, name, num_hidden_layers=2, **options)
    return open_model(folder)


# --- weights -----------------------------------------------------------------------------------


class Without(Altered):
    def __init__(self, files: ModelFiles, name: str) -> None:
        super().__init__(files.weights, lambda _, tensor: tensor)
        self._missing = name

    @property
    def names(self) -> frozenset[str]:
        return super().names - {self._missing}


def change_one(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor], Tensor]:
    return lambda each, tensor: change(tensor) if each == name else tensor


def test_every_missing_tensor_is_named(files):
    for name in files.weights.names:
        with pytest.raises(ModelFileError, match="is missing") as caught:
            make_decoder(files.config, Without(files, name), "auto")
        assert repr(name) in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_tensor_that_is_not_finite_is_named(files, value):
    def poison(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    for name in files.weights.names:
        source = Altered(files.weights, change_one(name, poison))
        with pytest.raises(ModelFileError, match="NaN or infinity") as caught:
            make_decoder(files.config, source, "auto")
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:-1],
        lambda t: torch.cat([t, t[:1]]),
        lambda t: t[:1],
        lambda t: t.unsqueeze(0),
        lambda t: t.new_ones(()),
    ],
    ids=["short", "long", "would broadcast", "one more dimension", "scalar"],
)
def test_every_wrong_shape_is_named(files, change):
    for name in files.weights.names:
        source = Altered(files.weights, change_one(name, change))
        with pytest.raises(ModelFileError, match="has shape") as caught:
            make_decoder(files.config, source, "auto")
        message = str(caught.value)
        assert repr(name) in message
        assert str(list(source.shape(name))) in message
        assert str(list(files.weights.shape(name))) in message


def test_a_weight_too_large_for_the_format_is_refused(llama):
    name = "model.layers.1.mlp.down_proj.weight"
    source = Altered(llama.weights, change_one(name, lambda tensor: tensor + 1e5))
    with pytest.raises(ModelFileError, match=r"layers\.1\.mlp\.down_proj"):
        make_decoder(llama.config, source, "auto", torch.float16)


# --- choice of kernels -------------------------------------------------------------------------


def shaped(config: ModelConfig, **changes: int) -> ModelConfig:
    return replace(config, **changes)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "changes", "block_size", "expected"),
    [
        ("auto", CPU, torch.float32, {}, 32, "compiled"),
        ("auto", CPU, torch.bfloat16, {"head_size": 256}, 32, "compiled"),
        ("auto", CPU, torch.float32, {"hidden_size": 200}, 32, "numba"),
        ("auto", CPU, torch.float16, {}, 32, "torch"),
        ("auto", CPU, torch.float32, {"head_size": 80}, 32, "torch"),
        ("auto", CPU, torch.float32, {"head_size": 16}, 32, "torch"),
        ("auto", CPU, torch.float32, {"intermediate_size": 100}, 32, "torch"),
        ("auto", CPU, torch.float32, {}, 16, "torch"),
        ("auto", CUDA, torch.bfloat16, {}, 32, "torch"),
        ("torch", CPU, torch.float32, {}, 32, "torch"),
        ("numba", CPU, torch.bfloat16, {}, 32, "numba"),
        ("compiled", CPU, torch.bfloat16, {}, 32, "compiled"),
    ],
)
@pytest.mark.parametrize("amx", [False, True])
def test_kernels_are_chosen_by_what_fits(
    llama, monkeypatch, amx, name, device, dtype, changes, block_size, expected
):
    monkeypatch.setattr(decoder_module, "has_amx", lambda: amx)
    config = shaped(llama.config, **changes)
    if amx and name == "auto" and expected == "compiled" and dtype == torch.bfloat16:
        expected = "numba"  # tiles multiply faster than vectors
    assert choose_kernels(name, device, dtype, config, block_size) == expected


@pytest.mark.parametrize(
    ("device", "dtype", "changes", "block_size", "named"),
    [
        (CUDA, torch.bfloat16, {}, 32, "cuda"),
        (CPU, torch.float16, {}, 32, "float16"),
        (CPU, torch.float32, {"head_size": 80}, 32, "80"),
        (CPU, torch.float32, {"intermediate_size": 100}, 32, "100"),
        (CPU, torch.float32, {}, 64, "64"),
    ],
)
@pytest.mark.parametrize("name", ["numba", "compiled"])
def test_kernels_where_they_cannot_run_are_refused(
    llama, name, device, dtype, changes, block_size, named
):
    config = shaped(llama.config, **changes)
    with pytest.raises(ConfigError, match="kernels='auto'") as caught:
        choose_kernels(name, device, dtype, config, block_size)
    assert named in str(caught.value)


# --- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["torch", "numba", "compiled"])
@pytest.mark.parametrize("rows", [[], [0], [5], [0, 2, 5], [3, 4, 5]])
def test_only_the_rows_asked_for_are_projected(llama, kernels, rows):
    decoder = make_decoder(llama.config, llama.weights, kernels)
    prompt = random_prompt(6, seed=1)
    found = []
    for wanted in (None, rows):
        harness = Harness(decoder, num_blocks=3)
        found.append(harness.step([(prompt, 0, harness.blocks_for(6))], wanted))
    assert found[1].shape == (len(rows), VOCAB)
    assert torch.allclose(found[1], found[0][rows], atol=1e-5)


@pytest.mark.parametrize("fast", ["numba", "compiled"])
def test_fast_kernels_agree_with_torch_in_bf16(files, fast):
    # Norms, rotations and activations round at the same places: the rest is the order of sums.
    prompts = [random_prompt(length, seed=length) for length in (1, 33, 300)]
    results = [
        torch.cat(
            run_decoder(
                make_decoder(files.config, files.weights, kernels, dtype), prompts, (100, 37)
            )
        )
        for kernels, dtype in [
            (fast, torch.bfloat16), ("torch", torch.bfloat16), ("torch", torch.float32)
        ]
    ]  # fmt: skip
    ours, twin, exact = results
    assert not torch.equal(ours, exact)
    # No further from the exact result than the plain form is, on the whole.
    errors = [float((each - exact).square().mean().sqrt()) for each in (ours, twin)]
    assert errors[0] < errors[1] * 1.2


@pytest.mark.parametrize("kernels", ["torch", "numba", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rubbish_in_the_cache_changes_nothing(files, kernels, dtype):
    # The harness draws other rubbish, and scatters blocks otherwise, for each seed.
    decoder = make_decoder(files.config, files.weights, kernels, dtype)
    prompts = [random_prompt(length, seed=length) for length in (1, 33, 100)]
    first, again = (run_decoder(decoder, prompts, (20, 7), seed=seed) for seed in (0, 1))
    for one, other in zip(first, again, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


def test_what_was_drafted_and_dropped_leaves_no_trace(files):
    decoder = make_decoder(files.config, files.weights, "auto")
    prompt, draft = random_prompt(50, seed=1), random_prompt(12, seed=2)
    expected = torch.cat(run_decoder(decoder, [prompt], (40, 1)))
    harness = Harness(decoder, num_blocks=8)
    blocks = harness.blocks_for(64)
    harness.step([(prompt[:40], 0, blocks)])
    for position in range(40, 50):  # every step drafts twelve tokens, all of them refused
        logits = harness.step([([prompt[position], *draft], position, blocks)])
        assert torch.allclose(logits[0], expected[position], atol=1e-5)


@pytest.mark.parametrize(("context", "num_threads"), [(20, 1), (250, 2), (130, 5)])
@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        pytest.param("numba", torch.bfloat16, marks=NEEDS_BF16),
        ("compiled", torch.bfloat16),
        ("compiled", torch.float32),
    ],
)
def test_a_row_has_the_same_bits_in_any_company(files, kernels, dtype, context, num_threads):
    torch.set_num_threads(min(num_threads, 2))
    decoder = make_decoder(files.config, files.weights, kernels, dtype, num_threads=num_threads)
    tokens = random_prompt(context + 16, seed=context)
    stranger_prompts = [random_prompt(length, seed=length) for length in (7, 64, 270)]
    harness = Harness(decoder, num_blocks=64)
    blocks = harness.blocks_for(context + 16)
    strangers = [(prompt, harness.blocks_for(len(prompt) + 4)) for prompt in stranger_prompts]
    harness.step([(tokens[:context], 0, blocks)])
    for prompt, own in strangers:
        harness.step([(prompt, 0, own)])
    others = [(prompt[:3], len(prompt), own) for prompt, own in strangers]
    alone = torch.cat(
        [harness.step([([tokens[p]], p, blocks)]) for p in range(context, context + 16)]
    )
    for count in (2, 3, 4, 8, 13, 16):
        rows = harness.step([(tokens[context : context + count], context, blocks)])
        assert torch.equal(rows, alone[:count]), f"a block of {count} rows"
        late = harness.step([(tokens[context + 16 - count :], context + 16 - count, blocks)])
        assert torch.equal(late, alone[16 - count :]), f"a block of {count} late rows"
        for place in (0, 2, 3):
            mine = (tokens[context : context + count], context, blocks)
            parts = [*others[:place], mine, *others[place:]]
            before = sum(len(part[0]) for part in others[:place])
            wanted = range(before, before + count)
            found = harness.step(parts, wanted if place else None)
            found = found if place else found[:count]
            assert torch.equal(found, alone[:count]), f"{count} rows, {place} strangers before"
