"""The certificate's statistics against scipy, and against simulation."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from forerun.measure.certify import statistics
from forerun.measure.certify.statistics import (
    MIN_EXPECTED,
    compare_counts,
    compare_with_exact,
    detectable_shift,
    family_threshold,
    samples_for_shift,
)

PROBS = np.array([1, 2, 3, 5, 8, 13, 21, 34]) / 87


def draw(rng: np.random.Generator, num: int, probs: np.ndarray) -> Counter[int]:
    return Counter(dict(enumerate(rng.multinomial(num, probs).tolist())))


# --- the tests themselves ----------------------------------------------------------------------


def test_two_samples_give_scipys_statistic_but_for_williams_correction():
    first, second = [20, 30, 50, 40], [31, 22, 47, 100]
    expected = stats.chi2_contingency([first, second], lambda_="log-likelihood", correction=False)
    test = compare_counts(Counter(dict(enumerate(first))), Counter(dict(enumerate(second))))
    assert (test.df, test.num_cells, test.num_first, test.num_second) == (3, 4, 140, 200)
    assert test.statistic == pytest.approx(expected.statistic, rel=0.02)
    assert test.statistic < expected.statistic
    assert test.p_value == pytest.approx(stats.chi2.sf(test.statistic, 3), rel=1e-12)


def test_one_sample_gives_scipys_statistic_but_for_williams_correction():
    counts, probs = [25, 40, 35], [0.3, 0.3, 0.4]
    expected = stats.power_divergence(counts, np.multiply(probs, 100), lambda_="log-likelihood")
    test = compare_with_exact(Counter(dict(enumerate(counts))), dict(enumerate(probs)))
    assert (test.df, test.num_first, test.num_second, test.num_samples) == (2, 100, 0, 100)
    assert test.statistic == pytest.approx(
        expected.statistic / (1 + (28 / 3 - 2 + 0.5) / 1200), 1e-2
    )
    assert test.statistic < expected.statistic


def test_the_order_of_samples_and_cells_does_not_matter():
    rng = np.random.default_rng(1)
    first, second = draw(rng, 300, PROBS), draw(rng, 500, PROBS)
    turned = Counter(dict(reversed(first.items())))
    assert compare_counts(first, second) == compare_counts(turned, second)
    assert compare_counts(second, first).p_value == pytest.approx(
        compare_counts(first, second).p_value
    )


def test_small_cells_are_pooled():
    first = Counter(a=100, b=100, c=3, d=4, e=5)
    second = Counter(a=100, b=100, c=5, d=4, f=5)
    # c-f: 26 in both arms together, 13 expected in each
    assert compare_counts(first, second).num_cells == 3
    # 13 is not enough: a and b are equally large, so one of them takes the rest
    assert compare_counts(first, second, min_expected=14).num_cells == 2
    exact = {"a": 0.5, "b": 0.4, "c": 0.05, "d": 0.04, "e": 0.01}
    assert compare_with_exact(Counter(a=50, b=40, c=5, d=4, e=1), exact).num_cells == 3
    assert compare_with_exact(Counter(a=40, b=32, c=4, d=3, e=1), exact).num_cells == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [(Counter(), Counter()), (Counter(a=90), Counter()), (Counter(a=90), Counter(a=50))],
)
def test_nothing_to_compare_is_no_difference(first: Counter[str], second: Counter[str]):
    test = compare_counts(first, second)
    assert (test.statistic, test.df, test.p_value) == (0.0, 0, 1.0)
    assert compare_with_exact(first, {"a": 1.0}).p_value == 1.0


def test_what_cannot_come_fails_however_rare():
    assert compare_with_exact(Counter(a=10**6, b=1), {"a": 1.0}).p_value == 0
    assert compare_with_exact(Counter(a=10**6, b=1), {"a": 1.0, "b": 0.0}).p_value == 0
    assert compare_with_exact(Counter(a=10**6), {"a": 1.0, "b": 0.0}).p_value == 1


def test_p_values_are_uniform_if_nothing_differs():
    """Down to a thousandth, with cells as small as they may be."""
    rng, num = np.random.default_rng(2), 10_000
    smallest = np.full(20, 1 / 20)
    size = int(20 * MIN_EXPECTED)
    two = [
        compare_counts(draw(rng, size, smallest), draw(rng, size, smallest)).p_value
        for _ in range(num)
    ]
    exact = dict(enumerate(smallest.tolist()))
    one = [compare_with_exact(draw(rng, size, smallest), exact).p_value for _ in range(num)]
    for p_values in (two, one):
        assert stats.kstest(p_values, "uniform").pvalue > 1e-3
        for limit in (0.1, 0.01, 0.001):
            num_below = sum(p < limit for p in p_values)
            assert stats.binom.sf(num_below - 1, num, limit) > 1e-3


def test_a_family_of_tests_errs_as_often_as_stated():
    assert family_threshold(50, 1e-3) == pytest.approx(2e-5)
    assert family_threshold(0, 1e-3) == 1e-3


# --- power ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("df", [1, 7, 63, 400])
@pytest.mark.parametrize("x", [0.5, 10.0, 80.0, 500.0, 3000.0])
def test_tails_are_scipys(df: int, x: float):
    assert statistics._chi2_sf(x, df) == pytest.approx(stats.chi2.sf(x, df), rel=1e-8, abs=1e-300)
    for noncentrality in (0.0, 0.3, 20.0, 700.0):
        expected = stats.ncx2.sf(x, df, noncentrality) if noncentrality else stats.chi2.sf(x, df)
        assert statistics._noncentral_sf(x, df, noncentrality) == pytest.approx(
            expected, rel=1e-8, abs=1e-12
        )


@pytest.mark.parametrize(("df", "threshold", "power"), [(1, 0.05, 0.8), (15, 1e-5, 0.99)])
def test_detectable_shift_solves_the_noncentral_equation(df: int, threshold: float, power: float):
    shift = detectable_shift(5000, df, threshold, power)
    limit = stats.chi2.isf(threshold, df)
    assert stats.ncx2.sf(limit, df, 2 * 5000 * shift**2) == pytest.approx(power, abs=1e-9)
    assert samples_for_shift(shift, df, threshold, power) == pytest.approx(5000, abs=1)
    assert detectable_shift(20_000, df, threshold, power) == pytest.approx(shift / 2)


def test_a_known_size():
    """One degree of freedom, 5 % and 80 %: lambda is (1.96 + 0.84)^2 = 7.85."""
    assert samples_for_shift(0.01, 1, 0.05, 0.8) == pytest.approx(7.849 / 0.0002, rel=1e-3)


def test_too_few_samples_catch_nothing_for_sure():
    assert detectable_shift(3, 15, 1e-5) == 1
    assert detectable_shift(0, 15, 1e-5) == 1
    assert detectable_shift(1000, 0, 1e-5) == 1


@pytest.mark.parametrize(
    ("num_first", "num_second"), [(4000, 4000), (3000, 6000), (2000, math.inf)]
)
def test_the_hardest_shift_is_caught_as_often_as_promised(num_first: int, num_second: float):
    """Half of the mass gains in proportion, the other half loses: 80 % of all runs must fail."""
    rng, num, threshold, power = np.random.default_rng(3), 4000, 1e-3, 0.8
    probs = np.array([1, 2, 3, 4, 4, 3, 2, 1]) / 20
    harmonic_mean = 2 / (1 / num_first + 1 / num_second)
    shift = detectable_shift(harmonic_mean, 7, threshold, power)
    shifted = probs * np.where(np.arange(8) < 4, 1 + 2 * shift, 1 - 2 * shift)
    assert abs(shifted - probs).sum() / 2 == pytest.approx(shift)
    caught = 0
    for _ in range(num):
        first = draw(rng, num_first, shifted)
        if num_second == math.inf:
            test = compare_with_exact(first, dict(enumerate(probs.tolist())))
        else:
            test = compare_counts(first, draw(rng, int(num_second), probs))
        caught += test.p_value < threshold
    # four standard errors of the count, and 1 % for an approximation that is one of small shifts
    assert caught / num == pytest.approx(power, abs=4 * math.sqrt(0.16 / num) + 0.01)


def test_other_shifts_of_that_size_are_caught_more_often():
    rng, threshold = np.random.default_rng(4), 1e-3
    probs = np.array([0.2, 0.2, 0.3, 0.3])
    shift = detectable_shift(4000, 3, threshold, 0.8)
    shifted = probs + np.array([shift, -shift, 0, 0])
    caught = sum(
        compare_counts(draw(rng, 4000, shifted), draw(rng, 4000, probs)).p_value < threshold
        for _ in range(300)
    )
    assert caught / 300 > 0.95
