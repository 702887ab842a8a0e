"""The likeliest tokens of a head's logits: compiled and in torch alike, and what is no number."""

from __future__ import annotations

import math

import pytest
import torch

from forerun.draft import guesses
from forerun.draft.guesses import DraftWords, likeliest
from forerun.errors import InvalidLogits


@pytest.mark.parametrize("width", [1, 5, 64, 300, 8192])
@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("padding", [0, 7])
def test_they_are_torchs(width, count, padding):
    dice = torch.Generator().manual_seed(width + count)
    wide = 4 * torch.randn(6, width + padding, generator=dice)
    wide[:, width:] = 99  # padding of a pass: larger, and not asked about
    logits = wide[:, :width]
    found = likeliest(logits, count, DraftWords(None))
    want = logits.log_softmax(-1).topk(min(count, width), -1)
    assert [[token for token, _ in row] for row in found] == want.indices.tolist()
    for row, values in zip(found, want.values.tolist(), strict=True):
        assert [value for _, value in row] == pytest.approx(values, rel=1e-4, abs=1e-5)
    values, indexes, sums = guesses.by_torch(logits, min(count, width))
    assert indexes == want.indices.tolist()
    assert sums == pytest.approx([math.exp(-row[0][1]) for row in found], rel=1e-4)
    assert [len(row) for row in values] == [min(count, width)] * 6


def test_of_equals_the_first():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    assert [token for token, _ in likeliest(logits, 3, DraftWords(None))[0]] == [1, 2, 4]


def test_tokens_are_named_as_the_target_does():
    words = DraftWords(torch.tensor([5, 70, 900]))
    row = likeliest(torch.tensor([[0.0, 2.0, 1.0]]), 2, words)[0]
    assert [token for token, _ in row] == [70, 900]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 9, 299])
@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_no_number_is_refused(bad, place, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(guesses, "_compiled", guesses.by_torch)
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    logits[1, place] = bad
    with pytest.raises(InvalidLogits, match="row 1 of 3"):
        likeliest(logits, 4, DraftWords(None))
    assert len(likeliest(logits[[0, 2]], 4, DraftWords(None))) == 2


def test_whoever_is_sure_is_never_more_than_sure():
    """exp(0) of the kernel is a little under 1: the log-probability is 0 at most all the same."""
    logits = torch.full((1, 300), -80.0)
    logits[0, 7] = 40.0
    assert likeliest(logits, 2, DraftWords(None))[0][0] == (7, 0.0)


def test_no_rows():
    assert likeliest(torch.empty(0, 10), 4, DraftWords(None)) == []
