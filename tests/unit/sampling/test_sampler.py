"""Sampler: the distribution that was asked for, one token for one row and one uniform."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference.filters_slow import filtered_row
from scipy import stats

from forerun.params import SamplingParams
from forerun.sampling import (
    FilterParams,
    Stream,
    bad_rows,
    filtered_probs,
    sample_from_probs,
    sample_tokens,
    uniforms,
)

NUM_TRIALS = 200_000
FIVE_SIGMA = stats.norm.sf(5)
LAST = 1 - 2.0**-53
LOGITS = [0.3, -1.2, 2.0, 0.3, 0.9, -0.4, 1.5, 0.0, -2.5, 1.1, 0.7, -0.9, 1.9, 0.2, -0.1, 0.5]
MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_k=40),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9),
    SamplingParams(temperature=1.5, top_p=0.95),
    SamplingParams(temperature=0.6, min_p=0.05),
    SamplingParams(temperature=1e-6, top_k=1),
    SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.01),
    SamplingParams(temperature=3.0, top_k=700, top_p=0.99),
]


def draw(logits: torch.Tensor, rows: list[SamplingParams], noise: torch.Tensor) -> torch.Tensor:
    return sample_tokens(logits, FilterParams.from_params(rows), noise)


def p_value(tokens: torch.Tensor, expected: list[float]) -> float:
    counts = np.bincount(tokens.numpy(), minlength=len(expected))
    probs = np.array(expected)
    if counts[probs == 0].any():
        return 0.0
    alive = probs > 0
    return float(stats.chisquare(counts[alive], probs[alive] * counts.sum()).pvalue)


@pytest.mark.parametrize("params", [row for row in MIXED if row.temperature > 0.1])
def test_samples_follow_the_distribution(params: SamplingParams):
    positions = np.arange(NUM_TRIALS, dtype=np.int64)
    noise = uniforms(np.full(NUM_TRIALS, 7, dtype=np.uint64), positions, Stream.TARGET)
    logits = torch.tensor(LOGITS).expand(NUM_TRIALS, -1)
    filters = FilterParams.from_params([params]).repeat(torch.tensor([NUM_TRIALS]), NUM_TRIALS)
    tokens = sample_tokens(logits, filters, noise)
    slow = filtered_row(LOGITS, params.temperature, params.top_k, params.top_p, params.min_p)
    assert p_value(tokens, slow.probs) > FIVE_SIGMA
    # Negative control: one per cent of the mass moved between two tokens must be seen.
    alive = [i for i, p in enumerate(slow.probs) if p > 0.02]
    shifted = list(slow.probs)
    shifted[alive[0]] -= 0.01
    shifted[alive[1]] += 0.01
    assert p_value(tokens, shifted) < FIVE_SIGMA


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_see_its_neighbours(dtype: torch.dtype):
    """Alone, among others and behind others; bfloat16 logits are full of ties at the cuts."""
    generator = torch.Generator().manual_seed(3)
    rows = MIXED * 6
    logits = (torch.randn(len(rows), 2003, generator=generator) * 2.5).to(dtype)
    noise = torch.rand(len(rows), generator=generator, dtype=torch.float64)
    together = draw(logits, rows, noise)
    for i, params in enumerate(rows):
        assert draw(logits[i : i + 1], [params], noise[i : i + 1]) == together[i]
    for width in (2, 5, 16):
        for i in range(0, len(rows), width):
            some = slice(i, i + width)
            assert torch.equal(draw(logits[some], rows[some], noise[some]), together[some])


def test_candidates_and_the_whole_vocabulary_give_the_same_token():
    """Rows of top-k alone work on candidates; one row without it makes all work on every column."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(400, 1500, generator=generator) * 2
    noise = torch.rand(400, generator=generator, dtype=torch.float64)
    rows = [SamplingParams(temperature=0.9, top_k=1 + i % 60, top_p=0.97) for i in range(400)]
    narrow = draw(logits, rows, noise)
    full = draw(
        torch.cat([logits, logits[:1]]),
        [*rows, SamplingParams()],
        torch.cat([noise, noise[:1]]),
    )
    assert torch.equal(narrow, full[:-1])
    assert len(narrow.unique()) > 100


def test_ties_past_the_candidates_are_not_lost():
    """200 equal logits against top-k 2: all survive, far more than the candidates looked at."""
    logits = torch.full((1000, 300), -5.0)
    logits[:, 50:250] = 1.0
    noise = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens = draw(logits, [SamplingParams(top_k=2)] * 1000, noise)
    assert tokens.unique().tolist() == list(range(50, 250))
    greedy = draw(logits, [SamplingParams(temperature=0), *[SamplingParams(top_k=2)] * 999], noise)
    assert int(greedy[0]) == 50
    assert torch.equal(greedy[1:], tokens[1:])


def test_greedy_takes_the_lowest_of_equal_logits():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0], [float("-inf"), -1.0, -1.0]])
    noise = torch.full((3,), LAST, dtype=torch.float64)
    assert draw(logits, [SamplingParams(temperature=0)] * 3, noise).tolist() == [1, 0, 1]


@pytest.mark.parametrize("u", [0.0, 5e-324, 0.5, LAST])
def test_no_uniform_finds_a_token_of_probability_zero(u: float):
    noise = torch.tensor([u], dtype=torch.float64)
    inf = float("-inf")
    logits = torch.tensor([[inf, inf, 0.3, inf, 0.1, inf]])
    assert int(draw(logits, [SamplingParams()], noise)) in (2, 4)
    assert int(sample_from_probs(torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.7, 0.0]]), noise)) in (2, 4)
    wide = torch.randn(1, 150_001)
    wide[0, -1] = inf
    params = SamplingParams(top_p=0.999)
    token = int(draw(wide, [params], noise))
    assert float(filtered_probs(wide, FilterParams.from_params([params]))[0, token]) > 0


def test_tokens_lie_in_vocabulary_order_along_the_uniform():
    noise = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, LAST], dtype=torch.float64)
    probs = torch.tensor([0.25, 0.5, 0.25]).expand(6, -1)
    assert sample_from_probs(probs, noise).tolist() == [0, 0, 1, 1, 2, 2]
    assert sample_from_probs(probs * 1e-20, noise).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("params", MIXED)
def test_bad_rows_harm_nobody_else(params: SamplingParams):
    """A row of NaN gives some id of the vocabulary, and its neighbours what they had without it."""
    nan, inf = float("nan"), float("inf")
    logits = torch.randn(5, 40)
    noise = torch.full((5,), 0.6, dtype=torch.float64)
    before = draw(logits, [params] * 5, noise)
    logits[1], logits[2, 3], logits[3] = nan, inf, -inf
    after = draw(logits, [params] * 5, noise)
    fine = ~bad_rows(logits)
    assert fine.tolist() == [True, False, False, False, True]
    assert torch.equal(after[fine], before[fine])
    assert bool(((after >= 0) & (after < 40)).all())


def test_an_empty_batch_is_fine():
    nothing = torch.zeros(0, dtype=torch.float64)
    assert draw(torch.zeros(0, 7), [], nothing).shape == (0,)
