"""Filters: equal to their slow twin, whatever the other rows of the batch ask for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference.filters_slow import SlowRow, filtered_row

from forerun.params import SamplingParams
from forerun.sampling import FilterParams, bad_rows, filtered_probs, filtered_weights

NEG_INF = -math.inf

# A coarse grid: ties are frequent and exact, and no two logits are nearly equal.
finite_logits = st.integers(-64, 64).map(lambda n: n / 8)
any_logits = st.one_of(finite_logits, finite_logits, finite_logits, st.just(NEG_INF))
sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 1e-300, 1e-6, 0.1, 0.7, 1, 1.3, 5, 100]),
    top_k=st.sampled_from([-1, 0, 0, 1, 2, 3, 7, 50]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-9, 0.9999), st.sampled_from([1e-12, 0.5, 0.9])),
    min_p=st.one_of(st.just(0.0), st.floats(1e-6, 1), st.just(1.0)),
)


def one(logits: list[float], params: SamplingParams) -> torch.Tensor:
    return filtered_probs(torch.tensor([logits]), FilterParams.from_params([params]))[0]


def slow_row(logits: list[float], params: SamplingParams) -> SlowRow:
    temperature = 0 if params.temperature < 1e-38 else params.temperature
    return filtered_row(logits, temperature, params.top_k, params.top_p, params.min_p)


def assert_like_slow(probs: torch.Tensor, slow: SlowRow) -> None:
    expected = torch.tensor(slow.probs, dtype=torch.float64)
    torch.testing.assert_close(probs.double(), expected, rtol=1e-5, atol=1e-9)
    assert not bool((probs[expected == 0] != 0).any()), "a filtered token has probability"
    likely = expected > 1e-11
    assert bool((probs[likely] > 0).all()), "a survivor has none"


@settings(deadline=None, max_examples=300)
@given(st.lists(any_logits, min_size=1, max_size=12), sampling)
def test_one_row_equals_its_slow_twin(logits: list[float], params: SamplingParams):
    assume(max(logits) > NEG_INF)
    slow = slow_row(logits, params)
    assume(slow.margin > 1e-5)
    assert_like_slow(one(logits, params), slow)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(2, 9).flatmap(
        lambda size: st.lists(
            st.tuples(st.lists(finite_logits, min_size=size, max_size=size), sampling),
            min_size=1,
            max_size=6,
        )
    )
)
def test_rows_do_not_see_each_other(rows: list[tuple[list[float], SamplingParams]]):
    together = filtered_weights(
        torch.tensor([logits for logits, _ in rows]),
        FilterParams.from_params([params for _, params in rows]),
    )
    for i, (logits, params) in enumerate(rows):
        alone = filtered_weights(torch.tensor([logits]), FilterParams.from_params([params]))
        assert torch.equal(together[i], alone[0])


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("top_k", [0, 600, 5000])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_flat_rows_fall_back_to_a_full_sort(
    spread: float, top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
):
    """At spread 0.1 the nucleus is wider than the columns that top-p looks at first."""
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(1)) * spread
    logits[1::2] *= 50  # peaked rows between flat ones
    params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p)
    filters = FilterParams.from_params([params] * 6)
    probs = filtered_probs(logits, filters)
    slow = [slow_row(row, params) for row in logits.tolist()]
    clear = [i for i in range(6) if slow[i].margin > 1e-6]
    assert len(clear) >= 3
    for i in clear:
        assert_like_slow(probs[i], slow[i])
    for columns in (1, 7, 3000):
        monkeypatch.setattr("forerun.sampling.filters.TOP_P_COLUMNS", columns)
        assert torch.equal(filtered_probs(logits, filters), probs)


def test_ties_stand_or_fall_together():
    logits = [1.0, 3.0, 2.0, 2.0, 0.0, 2.0]
    assert one(logits, SamplingParams(top_k=2)).gt(0).tolist() == [
        False,
        True,
        True,
        True,
        False,
        True,
    ]
    assert one([0.0] * 4, SamplingParams(top_p=0.5)).tolist() == [0.25] * 4
    assert one([5.0, 5.0, 4.0], SamplingParams(top_p=1e-9)).tolist() == [0.5, 0.5, 0.0]
    assert one([5.0, 5.0, 4.0], SamplingParams(temperature=0)).tolist() == [1.0, 0.0, 0.0]


def test_the_token_that_reaches_top_p_stays():
    logits = [math.log(0.5), math.log(0.3), math.log(0.2)]
    kept = one(logits, SamplingParams(top_p=0.6))
    torch.testing.assert_close(kept, torch.tensor([0.625, 0.375, 0.0]))


def test_top_p_counts_what_top_k_left():
    """0.5 of what is left of [0.4, 0.3, 0.2, 0.1] after top-k 2 is reached by the first token."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert one(logits, SamplingParams(top_k=2, top_p=0.5)).tolist() == [1, 0, 0, 0]
    assert one(logits, SamplingParams(top_p=0.5)).gt(0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6, 1e6, 1e300])
def test_extreme_temperatures_stay_finite(temperature: float):
    probs = one([-3e4, NEG_INF, 3e4, 2.9e4], SamplingParams(temperature=temperature))
    assert bool(probs.isfinite().all())
    assert float(probs.sum()) == pytest.approx(1)
    assert float(probs[1]) == 0
    assert float(probs[2]) == (1 if temperature < 1 else pytest.approx(1 / 3, abs=0.02))


def test_logits_are_left_alone():
    logits = torch.randn(4, 100)
    before = logits.clone()
    params = SamplingParams(temperature=0.5, top_k=5, top_p=0.5, min_p=0.1)
    filtered_probs(logits, FilterParams.from_params([params] * 4))
    assert torch.equal(logits, before)


def test_bad_rows_are_named():
    fine, nan, inf = [0.0, NEG_INF, 1.0], [0.0, math.nan, 1.0], [0.0, math.inf, 1.0]
    nothing = [NEG_INF] * 3
    both = [math.nan, math.inf, NEG_INF]
    rows = torch.tensor([fine, nan, inf, nothing, both, fine])
    assert bad_rows(rows).tolist() == [False, True, True, True, True, False]
    assert bad_rows(rows.bfloat16()).tolist() == [False, True, True, True, True, False]


def test_flags_are_known_to_the_host():
    greedy, plain = SamplingParams(temperature=0, top_k=9, top_p=0.5, min_p=0.5), SamplingParams()
    rows = FilterParams.from_params([greedy, greedy])
    assert rows.all_greedy
    assert (rows.any_top_k, rows.any_top_p, rows.any_min_p) == (False, False, False)
    rows = FilterParams.from_params([greedy, plain])
    assert rows.any_greedy
    assert (rows.all_greedy, rows.all_top_k, rows.any_top_k) == (False, False, False)
    rows = FilterParams.from_params([greedy, SamplingParams(top_k=9, top_p=0.5, min_p=0.5)])
    assert rows.all_top_k
    assert rows.any_top_k
    assert rows.any_top_p
    assert rows.any_min_p
    assert rows.max_top_k == 9


def test_requests_spread_over_their_rows():
    params = FilterParams.from_params([SamplingParams(top_k=k, top_p=k / 10) for k in (3, 4, 5)])
    rows = params.repeat(torch.tensor([2, 0, 3]), 5)
    assert rows.top_ks.tolist() == [3, 3, 5, 5, 5]
    assert rows.top_ps.tolist() == [0.3, 0.3, 0.5, 0.5, 0.5]
    assert rows.temperatures.shape == rows.min_ps.shape == (5,)
