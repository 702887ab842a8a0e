"""Typical-p against transformers' own, against a plain loop, and in any company."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TypicalLogitsWarper

from forerun.params import SamplingParams
from forerun.sampling import FilterParams, filtered_probs, sample_tokens


def probs_of(logits, **options):
    rows = [SamplingParams(**options)] * len(logits)
    return filtered_probs(logits, FilterParams.from_params(rows))


@pytest.mark.parametrize("size", [5, 700, 3000])
@pytest.mark.parametrize("typical_p", [0.05, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_it_is_what_transformers_keeps(size, typical_p, spread):
    logits = torch.randn(8, size, generator=torch.Generator().manual_seed(size)) * spread
    expected = (
        TypicalLogitsWarper(mass=typical_p)(torch.zeros(8, 1), logits.double()).softmax(-1).float()
    )
    ours = probs_of(logits, typical_p=typical_p)
    kept, theirs = ours > 0, expected > 0
    # float64 there, float32 and whole numbers here: a token at the cut may differ
    assert (kept != theirs).sum() <= 2
    same = (kept == theirs).all(-1)
    assert same.sum() >= 6
    assert torch.allclose(ours[same], expected[same], atol=2e-6)


def slow(logits: list[float], temperature: float, top_k: int, typical_p: float) -> set[int]:
    """Keep tokens one by one, the most typical first."""
    top = max(logits)
    odds = [math.exp((logit - top) / temperature) for logit in logits]
    if top_k:
        cut = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        odds = [o if logit >= cut else 0.0 for o, logit in zip(odds, logits, strict=True)]
    probs = [o / math.fsum(odds) for o in odds]
    entropy = -math.fsum(p * math.log(p) for p in probs if p > 0)
    order = sorted(
        (i for i, p in enumerate(probs) if p > 0), key=lambda i: abs(-math.log(probs[i]) - entropy)
    )
    kept, mass = set(), 0.0
    for i in order:
        if mass >= typical_p:
            break
        kept.add(i)
        mass += probs[i]
    return kept


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=40, unique=True),
    st.floats(0.3, 2.0),
    st.integers(0, 6),
    st.floats(0.05, 0.99),
)
def test_it_is_what_a_plain_loop_keeps(logits, temperature, top_k, typical_p):
    row = probs_of(
        torch.tensor([logits]), temperature=temperature, top_k=top_k, typical_p=typical_p
    )[0]
    kept = set(row.nonzero().squeeze(-1).tolist())
    expected = slow(logits, temperature, top_k, typical_p)
    # a tie of distances, or a sum that meets typical_p to the last bit, may go either way
    assert len(kept ^ expected) <= 1


def test_a_row_does_not_mind_its_company():
    logits = torch.randn(6, 2000, generator=torch.Generator().manual_seed(3)) * 3
    rows = [
        SamplingParams(typical_p=0.4),
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(typical_p=0.2, top_k=40),
        SamplingParams(top_p=0.5),
        SamplingParams(typical_p=0.9, top_p=0.9, min_p=0.01, temperature=1.4),
    ]
    together = filtered_probs(logits, FilterParams.from_params(rows))
    uniforms = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    tokens = sample_tokens(logits, FilterParams.from_params(rows), uniforms)
    for index, row in enumerate(rows):
        own = FilterParams.from_params([row])
        part = slice(index, index + 1)
        assert torch.equal(filtered_probs(logits[part], own), together[part])
        assert sample_tokens(logits[part], own, uniforms[part]) == tokens[index]
    assert together[1].count_nonzero() == 2000
    assert together[0].argmax() != logits[0].argmax() or together[0].count_nonzero() < 2000
