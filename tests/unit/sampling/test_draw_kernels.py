"""The compiled filters and draws: equal to their slow twin, near torch, the same in any company."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference.draw_slow import UNIT, crossing_of, odds_of, token_at, weights_of

from forerun.kernels.draw import draw
from forerun.kernels.select import COUNTS, WEIGHS, crossing
from forerun.kernels.team import new_counters
from forerun.kernels.workers import Workers
from forerun.params import SamplingParams
from forerun.sampling import (
    FilterParams,
    accept_block,
    accept_tokens,
    argmax_and_check,
    bad_rows,
    compiled,
    filtered_probs,
    filtered_weights,
    sample_and_check,
    sample_tokens,
)
from forerun.sampling.filters import torch_weights
from forerun.sampling.sampler import torch_sample
from forerun.sampling.target import LogitsTarget
from forerun.types import Proposal

VOCABULARY = 49_152
LAST = 1 - 2.0**-53
INF = math.inf
LOGITS = [
    st.integers(-40, 40).map(lambda n: n / 8),  # ties
    st.floats(-30, 30, width=32),
    st.just(-INF),
    st.sampled_from([0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38]),
]
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 1e-300, 1e-6, 0.1, 0.7, 0.8, 1, 1.3, 100, 1e300]),
    top_k=st.sampled_from([-1, 0, 0, 1, 2, 7, 33, 64, 69, 500]),
    top_p=st.one_of(
        st.just(1.0), st.floats(1e-9, 0.9999), st.sampled_from([1e-300, 0.5, 0.9999999])
    ),
    min_p=st.one_of(st.just(0.0), st.floats(1e-12, 1), st.just(1.0)),
)
MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_k=50),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.8, min_p=0.05),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.5, top_k=1),
    SamplingParams(temperature=1.5, top_k=3000),
    SamplingParams(temperature=2.0, top_k=60_000, top_p=0.999),
    SamplingParams(temperature=1e-6, top_p=1e-9),
    SamplingParams(temperature=1e6, top_p=0.3),
]


@dataclass
class Batch:
    """Rows of logits with a request each."""

    logits: torch.Tensor
    rows: list[SamplingParams]
    noise: torch.Tensor

    @property
    def params(self) -> FilterParams:
        return FilterParams.from_params(self.rows)


@st.composite
def batches(draw_from: st.DrawFn) -> Batch:
    size = draw_from(st.integers(1, 150))
    rows = draw_from(st.lists(SAMPLING, min_size=1, max_size=4))
    kinds = st.sampled_from([st.one_of(*LOGITS), st.one_of(*LOGITS[:3]), LOGITS[0], LOGITS[1]])
    seen = []
    for _ in rows:
        kind = draw_from(kinds)
        values = draw_from(st.lists(kind, min_size=min(size, 12), max_size=min(size, 12)))
        # the rest by a seed: drawing every number would take long
        picks = np.random.default_rng(draw_from(st.integers(0, 9))).integers(0, len(values), size)
        row = [values[pick] for pick in picks]
        row[draw_from(st.integers(0, size - 1))] = draw_from(LOGITS[1])  # so one is finite
        seen.append(row)
    noise = draw_from(st.lists(st.floats(0, LAST), min_size=len(rows), max_size=len(rows)))
    return Batch(torch.tensor(seen), rows, torch.tensor(noise, dtype=torch.float64))


def real_like(num_rows: int, seed: int, size: int = VOCABULARY) -> Batch:
    """Rows flat and peaked, with a request of each kind in turn."""
    generator = torch.Generator().manual_seed(seed)
    spread = 0.5 + 3.5 * torch.rand(num_rows, 1, generator=generator)
    logits = torch.randn(num_rows, size, generator=generator) * spread
    logits[::3] = (logits[::3] * 8).round() / 8  # ties
    noise = torch.rand(num_rows, generator=generator, dtype=torch.float64)
    return Batch(logits, [MIXED[i % len(MIXED)] for i in range(num_rows)], noise)


def assert_equals_slow(batch: Batch) -> None:
    weights = filtered_weights(batch.logits, batch.params)
    probs = filtered_probs(batch.logits, batch.params).numpy()
    tokens = sample_tokens(batch.logits, batch.params, batch.noise)
    filters = batch.params
    for i, row in enumerate(batch.logits.numpy()):
        slow = weights_of(
            row, float(filters.temperatures[i]), int(filters.top_ks[i]),
            float(filters.top_ps[i]), float(filters.min_ps[i]),
        )  # fmt: skip
        assert weights[i].tolist() == slow
        assert int(tokens[i]) == token_at(slow, float(batch.noise[i]))
        scale = 1.0 / float(sum(slow))
        assert np.array_equal(probs[i], (np.array(slow, np.float64) * scale).astype(np.float32))


@settings(deadline=None, max_examples=500)
@given(batches())
def test_rows_equal_their_slow_twin(batch: Batch) -> None:
    assert_equals_slow(batch)


def test_rows_of_a_real_size_equal_their_slow_twin() -> None:
    assert_equals_slow(real_like(2 * len(MIXED), seed=1))
    assert_equals_slow(real_like(len(MIXED), seed=2, size=VOCABULARY - 13))


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.one_of(*LOGITS[:2], LOGITS[3]), min_size=1, max_size=200),
    st.integers(0, 3),
    st.data(),
)
@example([0.0, -0.0, -0.0, 0.0, -1.0, 2.0], 0, None)
def test_the_crossing_is_where_enough_is_gathered(values, copies: int, data) -> None:
    values = [float(np.float32(value)) for value in values] * (copies + 1)
    numbers = (
        range(1, len(values) + 1) if data is None else [data.draw(st.integers(1, len(values)))]
    )
    array = np.zeros(-(-len(values) // 64) * 64, np.float32)
    top = np.float32(max(values))
    for needed in numbers:
        array[: len(values)] = values
        found = crossing(array, len(values), np.float32(-INF), top, COUNTS, float(needed))
        assert found == crossing_of(values, lambda _: 1, needed)
    odds = [1.0, *(math.exp(min(value, 0) / 4) for value in values[1:])]
    odds = np.array(odds, np.float32).tolist()
    for share in (1e-9, 0.3, 0.9, 1.0):
        array[: len(odds)] = odds
        needed = share * float(sum(int(each * UNIT) for each in odds))
        found = crossing(array, len(odds), np.float32(min(odds)), np.float32(1), WEIGHS, needed)
        assert found == crossing_of(odds, lambda each: int(each * UNIT), needed)


@pytest.mark.parametrize("size", [1, 64, 1000, 8192])
def test_a_row_is_the_same_alone_and_in_a_crowd(size: int) -> None:
    batch = real_like(300, seed=3, size=size)
    together = sample_tokens(batch.logits, batch.params, batch.noise)
    probs = filtered_probs(batch.logits, batch.params)
    for i in range(0, 300, 7):
        alone = slice(i, i + 1)
        params = FilterParams.from_params(batch.rows[alone])
        assert sample_tokens(batch.logits[alone], params, batch.noise[alone]) == together[i]
        assert torch.equal(filtered_probs(batch.logits[alone], params)[0], probs[i])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_shared_equals_alone(threads: int) -> None:
    batch = real_like(44, seed=4, size=3000)
    filters = batch.params
    results = []
    for run in (lambda kernel, *args: kernel(*args), Workers(threads).run):
        outputs = (
            np.empty((44, 4), np.float32), np.empty(44, np.int64), np.empty(44, np.int64),
            batch.noise.numpy(), np.empty(44, np.int64), np.empty((44, 3000), np.float32),
        )  # fmt: skip
        run(
            draw, batch.logits.numpy(), filters.temperatures.numpy(), filters.top_ks.numpy(),
            filters.top_ps.numpy(), filters.min_ps.numpy(), *outputs, new_counters(1),
        )  # fmt: skip
        results.append(outputs)
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 100, 49_152])
def test_bad_rows_are_those_that_torch_finds(size: int) -> None:
    specials = [0.0, -0.0, INF, -INF, math.nan, -math.nan, 3.4e38, -3.4e38, 1e-45]
    rows = torch.zeros(4 * len(specials) + 1, size)
    for index, special in enumerate(specials):
        rows[4 * index, 0] = special
        rows[4 * index + 1, -1] = special
        rows[4 * index + 2] = special
        rows[4 * index + 3] = -INF
        rows[4 * index + 3, size // 2] = special
    assert torch.equal(bad_rows(rows), ~rows.amax(-1).isfinite())
    assert bad_rows(rows[:0]).shape == (0,)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_the_largest_logit_is_the_first_of_equals(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = torch.randint(-3, 4, (60, size), generator=generator).float()  # full of ties
    rows[5], rows[6, -1], rows[7, 0], rows[8, size // 2] = -INF, math.nan, INF, -INF
    rows[9] = -0.0
    rows[9, -1] = 0.0
    tokens, bad = argmax_and_check(rows)
    assert bad == bad_rows(rows).tolist()
    greedy = FilterParams.from_params([SamplingParams(temperature=0)] * 60)
    drawn, _ = sample_and_check(rows, greedy, torch.full((60,), 0.5, dtype=torch.float64))
    for row, token in enumerate(tokens):
        assert token == (0 if bad[row] else int(rows[row].argmax()))
        assert bad[row] or token == int(drawn[row])


def test_odds_are_as_exact_as_they_say() -> None:
    row = np.linspace(-29, 0, 1_000_001, dtype=np.float32)
    for temperature in (0.7, 1.0, 1.3):
        odds = odds_of(row, temperature).astype(np.float64)
        exponents = row.astype(np.float64) / np.float64(np.float32(temperature))
        error = np.abs(odds / np.exp(exponents) - 1)
        assert (error <= 1.3e-7 * (1 + np.abs(exponents) * math.log2(math.e))).all()


def test_near_what_torch_says() -> None:
    """The two definitions of odds differ in the last bits, and so may a draw in very many."""
    batch = real_like(40 * len(MIXED), seed=5, size=4000)
    # at a temperature of a million all odds are within a few last bits of 1: the cuts are chance
    batch.rows = [row if row.temperature < 10 else MIXED[3] for row in batch.rows]
    slow = torch_weights(batch.logits, batch.params).double()
    slow /= slow.sum(-1, keepdim=True)
    difference = (filtered_probs(batch.logits, batch.params).double() - slow).abs().amax(-1)
    assert float((difference < 1e-6).double().mean()) > 0.99  # a cut may fall differently
    assert float(difference.max()) < 1e-3
    tokens = sample_tokens(batch.logits, batch.params, batch.noise)
    same = tokens == torch_sample(batch.logits, batch.params, batch.noise)
    assert float(same.double().mean()) > 0.99


def test_torch_stands_in_where_numba_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = real_like(len(MIXED), seed=6, size=300)
    monkeypatch.setattr(compiled, "fits", lambda tensor: False)
    tokens, bad = sample_and_check(batch.logits, batch.params, batch.noise)
    assert torch.equal(tokens, torch_sample(batch.logits, batch.params, batch.noise))
    assert torch.equal(
        filtered_weights(batch.logits, batch.params), torch_weights(batch.logits, batch.params)
    )
    assert filtered_probs(batch.logits, batch.params).sum(-1).allclose(torch.ones(len(MIXED)))
    assert not bool(bad.any())


@pytest.mark.parametrize("params", MIXED)
@pytest.mark.parametrize("size", [3, 64, 200])
def test_bad_rows_are_found_on_the_way(params: SamplingParams, size: int) -> None:
    logits = torch.randn(9, size, generator=torch.Generator().manual_seed(7))
    logits[1], logits[2, 1], logits[3], logits[4, -1] = math.nan, INF, -INF, math.nan
    logits[5, 0], logits[6, 1:], logits[7, -1] = math.nan, -INF, INF
    noise = torch.linspace(0, LAST, 9, dtype=torch.float64)
    filters = FilterParams.from_params([params] * 9)
    tokens, bad = sample_and_check(logits, filters, noise)
    assert torch.equal(bad, bad_rows(logits))
    assert bad.tolist() == [False, True, True, True, True, True, False, True, False]
    assert bool(((tokens >= 0) & (tokens < size)).all())
    assert torch.equal(filtered_probs(logits, filters).isnan().any(-1), bad)
    assert int(tokens[6]) == 0


@pytest.mark.parametrize("size", [5, 64, 1000, 3001])
@pytest.mark.parametrize("parallel", [False, True])
def test_rules_decide_the_same_from_logits_and_from_probabilities(
    size: int, parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parallel:
        workers = Workers(3)
        monkeypatch.setattr(
            compiled, "run", lambda kernel, size, *args: workers.run(kernel, *args, new_counters(1))
        )
    num_requests, num_drafts = 33, 5
    generator = torch.Generator().manual_seed(size)
    lengths = torch.arange(num_requests) % (num_drafts + 1)
    counts = lengths + 1
    num_rows = int(counts.sum())
    logits = torch.randn(num_rows, size, generator=generator) * 2
    params = FilterParams.from_params([MIXED[i % len(MIXED)] for i in range(num_requests)])
    params = params.repeat(counts, num_rows)
    starts = counts.cumsum(0) - counts
    index = torch.arange(num_drafts)
    judged = torch.where(index < lengths.unsqueeze(-1), starts.unsqueeze(-1) + index, 0)
    # drafts from the target itself, flattened: most are kept, some not, and p = q happens
    near = logits[judged.flatten()] * torch.tensor([1.0, 0.9, 0.7])[torch.arange(165) % 3, None]
    warm = FilterParams.from_params([SamplingParams(temperature=0.8)] * len(near))
    drawn = torch.rand(len(near), generator=generator, dtype=torch.float64)
    proposal = Proposal(
        sample_tokens(near, warm, drawn).view(num_requests, num_drafts),
        lengths,
        filtered_probs(near, warm).view(num_requests, num_drafts, size),
    )
    accepted = 0
    for _ in range(10):
        noise = (
            torch.rand(num_requests, num_drafts, generator=generator, dtype=torch.float64),
            torch.rand(num_requests, generator=generator, dtype=torch.float64),
        )
        for rule in (accept_tokens, accept_block):
            fast = rule(LogitsTarget(logits, params), proposal, *noise)
            slow = rule(filtered_probs(logits, params), proposal, *noise)
            assert torch.equal(fast.num_accepted, slow.num_accepted)
            assert torch.equal(fast.next_tokens, slow.next_tokens)
            accepted += int(slow.num_accepted.sum())
    assert accepted > 200


def test_rules_survive_bad_rows() -> None:
    logits = torch.randn(9, 100, generator=torch.Generator().manual_seed(8))
    logits[1], logits[2, 1], logits[3], logits[8] = math.nan, INF, -INF, math.nan
    params = FilterParams.from_params([SamplingParams()] * 9)
    probs = torch.full((3, 2, 100), 0.01)
    proposal = Proposal(torch.full((3, 2), 7), torch.full((3,), 2), probs)
    half = torch.full((3, 2), 0.5, dtype=torch.float64)
    for rule in (accept_tokens, accept_block):
        outcome = rule(LogitsTarget(logits, params), proposal, half, half[:, 0])
        assert bool(((outcome.next_tokens >= 0) & (outcome.next_tokens < 100)).all())
