"""Weights of eight bits: exact sums of whole numbers, and rows rounded as finely as they may be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.tiny_models import make_decoder, random_prompt, run_decoder, save_tiny_model

from forerun.errors import ConfigError
from forerun.kernels.integers import WEIGHT_LIMIT, round_row
from forerun.kernels.matrix import PANEL, add_product, product
from forerun.kernels.rows import embed_token
from forerun.model.loader import open_model
from forerun.model.panels import allocate, fill, quantise


def rounded_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    whole, scales = np.empty(x.shape, np.int16), np.empty(len(x), np.float32)
    for row in range(len(x)):
        round_row(x, row, whole, scales)
    return whole, scales


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    outputs=st.integers(1, 5 * PANEL),
    pairs=st.integers(1, 300),
    extreme=st.booleans(),
    add=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equal_to_sums_of_python_integers(rows, outputs, pairs, extreme, add, seed):
    dice = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, 2 * pairs, generator=dice)
    x = torch.randn(rows, 2 * pairs, generator=dice).numpy()
    if extreme:  # every number at its limit, with one sign: what could overflow would
        weight, x = torch.full_like(weight, -3.0), np.full_like(x, 7.0)
    panels = allocate(1, outputs, 2 * pairs, form="int8")
    width = panels.shape[1] * PANEL
    scales = np.zeros((1, width), np.float32)
    fill(panels[0], weight, scales[0])
    bias = torch.randn(1, width, generator=dice).numpy()
    whole, row_scales = rounded_rows(x)
    out = np.full((rows, width), 2.0, np.float32)
    run = add_product if add else product
    run(whole, row_scales, 0, rows, panels, scales, 0, 0, panels.shape[1], bias, out, 0, width)

    integers, found = quantise(weight)
    assert np.array_equal(found.numpy(), scales[0, :outputs])
    sums = whole.astype(object) @ integers.numpy().astype(object).T  # no size limit
    assert max(abs(total) for total in sums.ravel()) < 2**31
    factors = row_scales[:, None] * scales[:, :outputs]
    # one fused multiply-add: the product in float64 is exact to far below a last bit
    expected = sums.astype(np.float64).astype(np.float32).astype(np.float64) * factors
    expected = (expected + bias[:, :outputs]).astype(np.float32) + (2 if add else 0)
    np.testing.assert_allclose(out[:, :outputs], expected, rtol=3e-7, atol=3e-7)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=700),
    st.sampled_from([1.0, 1e-20, 1e-6]),
)
def test_rows_are_rounded_to_the_nearest_that_a_sum_can_hold(numbers, factor):
    x = np.array([numbers], np.float32) * np.float32(factor)
    whole, scales = rounded_rows(x)
    limit = min(32767, (2**31 - 1) // (WEIGHT_LIMIT * x.shape[1]))
    assert np.abs(whole.astype(np.int64)).max() <= limit
    top = float(np.abs(x).max())
    error = np.abs(whole.astype(np.float64) * scales[0] - x)
    # half a step, and the roundings of float32 on the way
    assert error.max() <= max(0.501 * top / limit + 1e-6 * top, 1e-30)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad):
    x = np.ones((2, 64), np.float32)
    x[1, 7] = bad
    whole, scales = rounded_rows(x)
    assert np.isfinite(scales[0])
    assert np.isnan(scales[1])
    weight = torch.ones(PANEL, 64)
    panels, scale = allocate(1, PANEL, 64, form="int8"), np.zeros((1, PANEL), np.float32)
    fill(panels[0], weight, scale[0])
    out = np.empty((2, PANEL), np.float32)
    product(whole, scales, 0, 2, panels, scale, 0, 0, 1, np.zeros_like(scale), out, 0, PANEL)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


def test_a_token_reads_its_row():
    weight = torch.randn(37, 32)
    panels, scales = allocate(1, 37, 32, form="int8"), np.zeros((1, 48), np.float32)
    fill(panels[0], weight, scales[0])
    whole, found = quantise(weight)
    x = np.zeros((1, 32), np.float32)
    for token in (0, 15, 16, 36):
        embed_token(token, panels, scales, x, 0)
        assert np.array_equal(x[0], whole[token].numpy() * found[token].numpy())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight")
    save_tiny_model(folder, "qwen2", head_dim=32, hidden_size=128, intermediate_size=192)
    return open_model(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_is_near_the_unrounded_one_and_keeps_its_bits(files, dtype):
    prompts = [random_prompt(length, seed=length) for length in (1, 33, 100)]
    decoder = make_decoder(files.config, files.weights, "auto", dtype, quantize="int8")
    assert decoder.kernels == "compiled"
    found = run_decoder(decoder, prompts, (100, 37))
    exact = run_decoder(make_decoder(files.config, files.weights, "torch"), prompts)
    for ours, theirs in zip(found, exact, strict=True):
        error = float((ours - theirs).square().mean().sqrt())
        assert 0 < error < 0.06 * float(theirs.square().mean().sqrt())
    for chunks in [(1,), (7, 3), (64, 1)]:
        again = run_decoder(decoder, prompts, chunks, seed=3)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_other_kernels_have_no_such_layers(files):
    for kernels in ("torch", "numba"):
        with pytest.raises(ConfigError, match="kernels='compiled'"):
            make_decoder(files.config, files.weights, kernels, quantize="int8")
