"""A draft model's passes, as they are and captured; how large its cache is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reference.tape import record

from forerun.draft import network
from forerun.draft.network import DraftNetwork, Piece, count_blocks
from forerun.model.decoder import load_decoder
from forerun.model.loader import open_model


@pytest.fixture(scope="module")
def decoder(tiny):
    files = open_model(tiny.folder)
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "kernels": "torch"}
    return load_decoder(files.config, files.weights, **options)


def passes(net):
    """Catch up on two requests, one of them in pieces, then go on with both."""
    ragged = [Piece(range(10, 30), 0, [3, 1, 4]), Piece(range(50, 55), 0, [7], wants_logits=False)]
    rest = [Piece([31], 20, [3, 1, 4]), Piece(range(55, 58), 5, [7])]
    return [net.forward(ragged), net.forward(rest), net.forward([Piece([9], 8, [7, 2])])]


def test_rows_are_those_of_whoever_wants_them(decoder, tiny):
    found = passes(DraftNetwork(decoder, 8, 8))
    texts = [
        [list(range(10, 30))],
        [[*range(10, 30), 31], list(range(50, 58))],
        [[*range(50, 58), 9]],
    ]
    for logits, wanted in zip(found, texts, strict=True):
        assert len(logits) == len(wanted)
        for row, tokens in zip(logits, wanted, strict=True):
            assert torch.allclose(row, torch.tensor(tiny.model.next_logits(tokens)), atol=1e-4)


def test_captured_passes_are_the_same(decoder):
    plain = passes(DraftNetwork(decoder, 8, 8))
    captured = passes(DraftNetwork(decoder, 8, 8, capture=record))
    for one, other in zip(plain, captured, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_nobody_wants_logits(decoder):
    net = DraftNetwork(decoder, 4, 8)
    assert net.forward([Piece([1, 2, 3], 0, [0], wants_logits=False)]).shape == (0, 304)


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "max_positions", "want"),
    [
        (400, 4, 64, 32),  # 4 requests of 8 blocks
        (400, 100, 64, 100),  # a quarter of the target's, whose blocks are as large
        (8, 100, 64, 8),  # one request has room
        (400, 4, 60, 32),  # whole blocks
    ],
)
def test_the_cache_has_a_share_of_the_targets(
    decoder, num_blocks, max_num_seqs, max_positions, want
):
    setting = SimpleNamespace(
        target=decoder, block_size=8, num_blocks=num_blocks, max_num_seqs=max_num_seqs
    )
    assert count_blocks(setting, decoder.cache_shape(8), max_positions) == want


def test_the_cache_has_a_bound(decoder, monkeypatch):
    shape = decoder.cache_shape(8)
    monkeypatch.setattr(network, "MAX_CACHE_BYTES", 20 * shape.block_bytes)
    setting = SimpleNamespace(target=decoder, block_size=8, num_blocks=4000, max_num_seqs=64)
    assert count_blocks(setting, shape, 64) == 20
