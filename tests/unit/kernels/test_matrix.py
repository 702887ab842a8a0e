"""Products over panels: equal to sums taken one by one in float32, whatever is computed beside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.kernels.matrix import PANEL, ROW_BLOCK, STRIP, add_product, product
from forerun.model.arrays import view
from forerun.model.panels import allocate, fill

FORMS = ["bfloat16", "float32"]
NONE = np.empty((3, 0), np.float32)  # scales are for weights of eight bits
ONES = np.ones(100, np.float32)


def slow_product(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """One fused multiply-add after the other: exact in float64, rounded once to float32."""
    sums = np.broadcast_to(bias, (len(x), len(weight))).astype(np.float32)
    for k in range(x.shape[1]):
        # a product of two float32 fits float64; adding a float32 rounds it far below a last bit
        exact = x[:, k, None].astype(np.float64) * weight[None, :, k].astype(np.float64)
        sums = (exact + sums).astype(np.float32)
    return sums


def packed(weight: torch.Tensor, *, form: str, layers: int = 1, layer: int = 0) -> np.ndarray:
    panels = allocate(layers, *weight.shape, form=form)
    fill(panels[layer], weight, NONE[layer])
    return panels


def multiply(x, first, end, panels, layer, panel, end_panel, bias, out, at, stride, add=False):
    run = add_product if add else product
    run(x, ONES, first, end, panels, NONE, layer, panel, end_panel, bias, out, at, stride)


def case(rows: int, outputs: int, inputs: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=dice)
    weight = torch.randn(outputs, inputs, generator=dice).bfloat16().float()
    panels = -(-outputs // PANEL)
    bias = torch.randn(1, panels * PANEL, generator=dice)
    return x.numpy(), weight, bias.numpy()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 13),
    outputs=st.integers(1, 6 * PANEL + 3),
    pairs=st.integers(1, 40),
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 1000),
)
def test_equal_to_the_slow_twin_to_the_last_bit(rows, outputs, pairs, form, seed):
    x, weight, bias = case(rows, outputs, 2 * pairs, seed)
    panels = packed(weight, form=form)
    width = panels.shape[1] * PANEL
    out = np.full((rows, width), np.nan, np.float32)
    multiply(x, 0, rows, panels, 0, 0, panels.shape[1], bias, out, 0, width)
    expected = slow_product(x, weight.numpy(), bias[0, :outputs])
    # Double rounding (float64, then float32) may differ from a fused one in very rare last bits.
    assert np.mean(out[:, :outputs] == expected) > 0.999
    np.testing.assert_allclose(out[:, :outputs], expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(
        out[:, outputs:], np.broadcast_to(bias[:, outputs:], (rows, width - outputs))
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_its_bits_in_any_company_and_any_cut(form):
    x, weight, bias = case(ROW_BLOCK + 5, 5 * PANEL, 64)
    panels = packed(weight, form=form)
    width = 5 * PANEL
    whole = np.empty((len(x), width), np.float32)
    multiply(x, 0, len(x), panels, 0, 0, 5, bias, whole, 0, width)
    for first, end in [(0, 1), (3, 5), (7, 10), (11, 15), (20, 69)]:
        for panel, end_panel in [(0, 1), (1, 3), (2, 5), (0, 5)]:
            part = np.full((end - first, width), np.nan, np.float32)
            at = panel * PANEL
            multiply(x, first, end, panels, 0, panel, end_panel, bias, part, at, width)
            inside = slice(panel * PANEL, end_panel * PANEL)
            assert np.array_equal(part[:, inside], whole[first:end, inside])
            assert np.isnan(np.delete(part, np.r_[inside], axis=1)).all(), "wrote beside its place"


def test_both_layouts_of_the_same_numbers_give_the_same_bits():
    x, weight, bias = case(9, 4 * PANEL, 96)
    results = []
    for form in FORMS:
        out = np.empty((9, 4 * PANEL), np.float32)
        multiply(x, 0, 9, packed(weight, form=form), 0, 0, 4, bias, out, 0, 4 * PANEL)
        results.append(out)
    assert np.array_equal(*results)


def test_a_layer_reads_its_own_weights_and_biases():
    x, weight, bias = case(2, 2 * PANEL, 32)
    panels = packed(weight, form="bfloat16", layers=3, layer=1)
    biases = np.stack([bias[0] + 100, bias[0], bias[0] - 100])
    out, alone = np.empty((2, 2, 2 * PANEL), np.float32)
    multiply(x, 0, 2, panels, 1, 0, 2, biases, out, 0, 2 * PANEL)
    multiply(x, 0, 2, packed(weight, form="bfloat16"), 0, 0, 2, bias, alone, 0, 2 * PANEL)
    assert np.array_equal(out, alone)
    multiply(x, 0, 2, panels, 2, 0, 2, biases, out, 0, 2 * PANEL)
    assert np.array_equal(out, np.broadcast_to(biases[2], out.shape)), "layer 2 holds zeros"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adding_rounds_as_two_steps_would(dtype):
    x, weight, bias = case(6, 3 * PANEL, 48)
    panels = packed(weight, form="bfloat16")
    before = torch.randn(6, 3 * PANEL, generator=torch.Generator().manual_seed(5)).to(dtype)
    sums = torch.empty(6, 3 * PANEL, dtype=dtype)
    multiply(x, 0, 6, panels, 0, 0, 3, bias, view(sums), 0, 3 * PANEL)
    target = before.clone()
    multiply(x, 0, 6, panels, 0, 0, 3, bias, view(target), 0, 3 * PANEL, add=True)
    assert torch.equal(target, before + sums)


def test_infinity_and_nan_come_through():
    x, weight, bias = case(5, PANEL, 32)
    x[1, 3], x[2, 0], x[3, 31] = np.nan, np.inf, -np.inf
    out = np.empty((5, PANEL), np.float32)
    multiply(x, 0, 5, packed(weight, form="bfloat16"), 0, 0, 1, bias, out, 0, PANEL)
    assert np.isfinite(out[[0, 4]]).all()
    assert np.isnan(out[1]).all()
    assert np.isinf(out[2:4]).all()


def test_strips_hold_whole_tiles():
    assert ROW_BLOCK % 4 == 0
    assert STRIP >= 1
