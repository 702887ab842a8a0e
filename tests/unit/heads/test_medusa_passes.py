"""Medusa heads equal their definition, layered and compiled."""

from __future__ import annotations

import pytest
import torch
from reference.head_slow import medusa_rows, random_head

from forerun.heads.config import MedusaConfig
from forerun.heads.eagle_runner import HeadPlace
from forerun.heads.medusa_runner import CompiledMedusa, LayeredMedusa, load_medusa
from forerun.model.decoder import load_decoder
from forerun.model.loader import open_model


@pytest.fixture(scope="module", params=["torch", "compiled"])
def target(request, tiny_compiled):
    files = open_model(tiny_compiled.folder)
    return load_decoder(
        files.config,
        files.weights,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=request.param,
        max_positions=64,
    )


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("kind", ["target", "shared", "apart", "few"])
def test_heads_equal_their_definition(target, kind, num_blocks):
    size, vocabulary = target.config.hidden_size, target.config.vocab_size
    drafted = 32 if kind == "few" else vocabulary
    config = MedusaConfig(
        num_heads=3,
        num_blocks=num_blocks,
        hidden_size=size,
        vocab_size=vocabulary,
        draft_vocab_size=drafted,
        shared_head=kind != "apart",
        own_head=kind in ("shared", "apart"),
        block_bias=num_blocks == 1,
    )
    ids = torch.arange(0, 32 * 5, 5) if kind == "few" else None
    head = random_head(config, 1, ids)
    runner = load_medusa(head, HeadPlace(target, 1, 32, 64))
    is_compiled = target.kernels == "compiled" and kind != "apart"
    assert type(runner) is (CompiledMedusa if is_compiled else LayeredMedusa)
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(2))
    found = runner.forward(x)
    assert found.shape == (3, 5, drafted)
    for index, y in enumerate(medusa_rows(head, x)):
        if kind == "shared":
            table = head.weights["out.weight"]
        elif kind == "apart":
            table = head.weights[f"heads.{index}.out.weight"]
        else:
            table = target.head_rows(torch.arange(vocabulary) if ids is None else ids)
        torch.testing.assert_close(found[index], y @ table.float().T, rtol=1e-3, atol=1e-3)
    alone = torch.cat([runner.forward(x[i : i + 1]) for i in range(5)], dim=1)
    torch.testing.assert_close(alone, found, rtol=1e-4, atol=1e-4)
    if is_compiled:
        assert torch.equal(alone, found), "company changes no bit"
