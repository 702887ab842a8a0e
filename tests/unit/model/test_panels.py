"""Panels: where each weight lies, and when two bytes hold it exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference.tiny_models import Altered, make_decoder, random_prompt, run_decoder, save_tiny_model

from forerun.kernels.rows import embed_token
from forerun.model.loader import open_model
from forerun.model.panels import PANEL, all_fit_bf16, allocate, fill

NONE = np.empty(0, np.float32)


@pytest.mark.parametrize("form", ["bfloat16", "float32"])
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 80])
def test_every_weight_lies_in_its_place(form, outputs):
    weight = torch.randn(outputs, 6).bfloat16().float()
    panels = allocate(1, outputs, 6, form=form)
    fill(panels[0], weight, NONE)
    for o in range(panels.shape[1] * PANEL):
        for k in range(6):
            if form == "bfloat16":
                pair = panels[0, o // PANEL, k // 2, o % PANEL]
                bits = (pair >> (16 * (k % 2))) & 0xFFFF
                found = np.array([bits << 16], np.uint32).view(np.float32)[0]
            else:
                found = panels[0, o // PANEL, k, o % PANEL]
            assert found == (weight[o, k] if o < outputs else 0)


@pytest.mark.parametrize("form", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_a_token_reads_its_row(form, dtype):
    weight = torch.randn(37, 32).bfloat16().float()
    panels = allocate(1, 37, 32, form=form)
    fill(panels[0], weight, NONE)
    x = np.zeros((2, 32), dtype)
    for token in (0, 15, 16, 36):
        embed_token(token, panels, NONE.reshape(1, 0), x, 1)
        row = x[1] if dtype == np.float32 else (x[1].astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(row, weight[token].numpy())
    assert not x[0].any()


def test_weights_that_do_not_fit_two_bytes_keep_four(tmp_path):
    save_tiny_model(tmp_path, "llama", head_dim=32)
    files = open_model(tmp_path)
    names = [name for name in files.weights.names if "proj" in name]
    assert not all_fit_bf16(files.weights, names), "random float32 weights"
    rounded = Altered(files.weights, lambda name, weight: weight.bfloat16().float())
    assert all_fit_bf16(rounded, names)
    prompt = random_prompt(40, seed=3)
    wide = make_decoder(files.config, files.weights, "compiled")
    narrow = make_decoder(files.config, rounded, "compiled")
    assert wide._weights.qkv.dtype == np.float32
    assert narrow._weights.qkv.dtype == np.uint32
    # What two bytes hold is computed to the same bits as by four.
    expected = make_decoder(files.config, rounded, "torch")
    found = torch.cat(run_decoder(narrow, [prompt]))
    assert torch.allclose(found, torch.cat(run_decoder(expected, [prompt])), atol=1e-4)


def test_bfloat16_files_are_not_read_twice():
    class Source:
        def dtype(self, name):
            return "BF16"

        def read(self, name):
            raise AssertionError("its format says all")

    assert all_fit_bf16(Source(), ["a", "b"])
