"""Tests of counts, and how small a difference they see.

G-tests, of two samples or of one against exact probabilities: 2 * sum(O * ln(O / E)), which is
about chi-square distributed if nothing differs. For small cells it is not: they are pooled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

__all__ = [
    "GTest",
    "compare_counts",
    "compare_with_exact",
    "detectable_shift",
    "family_threshold",
    "samples_for_shift",
]

# At 10 p-values down to 2e-5 come up as often as they should, in 40 cells of that size. At 5 those
# under 1e-4 come up twice as often; at 10 without Williams' correction as well.
MIN_EXPECTED = 10.0
NUM_HALVINGS = 60  # of a bisection

C = TypeVar("C", bound=Hashable)  # what is counted


@dataclass(frozen=True, slots=True)
class GTest:
    """One G-test. Without two cells to compare: statistic 0, df 0, p-value 1."""

    statistic: float  # infinite: something was seen that cannot be
    df: int  # num_cells - 1
    p_value: float
    num_cells: int  # after pooling
    num_first: int
    num_second: int  # 0: against exact probabilities

    @property
    def num_samples(self) -> int:
        return self.num_first + self.num_second


@dataclass(frozen=True, slots=True)
class _Cell:
    expected: float  # in the smaller arm
    observed: tuple[int, ...]  # one for each arm

    def __add__(self, other: _Cell) -> _Cell:
        observed = tuple(a + b for a, b in zip(self.observed, other.observed, strict=True))
        return _Cell(self.expected + other.expected, observed)


def compare_counts(
    first: Counter[C], second: Counter[C], min_expected: float = MIN_EXPECTED
) -> GTest:
    """Test whether two samples come from one distribution.

    The cells to pool are chosen by their counts in both samples together, which says nothing of how
    these differ.
    """
    num_first, num_second = first.total(), second.total()
    num_all = num_first + num_second
    if num_all == 0:
        return _g_test([], (), 0, 0)
    shares = (num_first / num_all, num_second / num_all)
    cells = [
        _Cell(both * min(shares), (first[key], second[key]))
        for key in sorted(first.keys() | second.keys(), key=repr)
        if (both := first[key] + second[key]) > 0
    ]
    return _g_test(_pool(cells, min_expected), shares, num_first, num_second)


def compare_with_exact(
    counts: Counter[C], probs: Mapping[C, float], min_expected: float = MIN_EXPECTED
) -> GTest:
    """Test whether a sample comes from a distribution that is known. Which cells to pool is, too.

    An outcome of probability 0, or one that `probs` does not list, fails the test however rare.
    """
    assert abs(math.fsum(probs.values()) - 1) < 1e-6, "probabilities of everything that can come"
    num = counts.total()
    if any(count and probs.get(key, 0.0) <= 0 for key, count in counts.items()):
        return GTest(math.inf, len(probs) - 1, 0.0, len(probs), num, 0)
    cells = [_Cell(num * p, (counts[key],)) for key, p in probs.items() if p > 0]
    return _g_test(_pool(cells, min_expected), (), num, 0)


def family_threshold(num_tests: int, family_error_rate: float) -> float:
    """Give the p-value under which one of many tests fails (Bonferroni).

    If nothing differs, some test fails with at most `family_error_rate`, however they depend on
    each other.
    """
    return family_error_rate / max(num_tests, 1)


def detectable_shift(num_per_arm: float, df: int, threshold_p: float, power: float = 0.99) -> float:
    """Find the smallest total-variation shift that a test of two equal arms catches.

    It fails with probability `power` at any shift of that size between the pooled cells, whatever
    its form; a larger vocabulary's cells that were pooled into one are one cell here. 1: no shift
    is sure to be caught.

    A shift delta of total variation d, sum|delta| = 2d, has the chi-square distance
    sum(delta^2 / p) >= (sum|delta|)^2 / sum(p) = 4 d^2 (Cauchy-Schwarz). Equality, the form that is
    hardest to see, is |delta| = 2d * p: half of the mass gains in proportion to p, the other half
    loses. Both arms stand delta / 2 from their pool, n samples each, so the statistic is about
    noncentral chi-square with lambda = 2 * n * (4 d^2 / 4) = 2 n d^2.

    Arms of n1 and n2 samples: lambda = n1 n2 / (n1 + n2) * 4 d^2, so pass their harmonic mean,
    2 n1 n2 / (n1 + n2). Against exact probabilities n2 is infinite: pass 2 n1.
    """
    if num_per_arm <= 0 or df == 0:
        return 1.0
    return min(1.0, math.sqrt(_noncentrality(df, threshold_p, power) / (2 * num_per_arm)))


def samples_for_shift(tv: float, df: int, threshold_p: float, power: float = 0.99) -> int:
    """Count the samples that each of two equal arms needs: the inverse of `detectable_shift`."""
    assert 0 < tv <= 1, "a total-variation shift"
    return math.ceil(_noncentrality(df, threshold_p, power) / (2 * tv**2))


def _pool(cells: list[_Cell], min_expected: float) -> list[_Cell]:
    """Merge small cells into one, and if that is still small, into the smallest of the others."""
    # Never ordered by what was observed in one arm: that would make samples look more alike or less
    cells = sorted(cells, key=lambda cell: -cell.expected)
    kept = [cell for cell in cells if cell.expected >= min_expected]
    small = cells[len(kept) :]
    if not small:
        return kept
    rest = small[0]
    for cell in small[1:]:
        rest += cell
    if kept and rest.expected < min_expected:
        rest += kept.pop()
    return [*kept, rest]


def _g_test(
    cells: list[_Cell], shares: tuple[float, ...], num_first: int, num_second: int
) -> GTest:
    """Add up cells. Without shares of the arms, a cell's expected count is exact."""
    df, num_all = len(cells) - 1, num_first + num_second
    if df < 1:
        return GTest(0.0, 0, 1.0, len(cells), num_first, num_second)
    terms, inverse = [], 0.0
    for cell in cells:
        both = sum(cell.observed) if shares else cell.expected
        inverse += num_all / both
        for observed, share in zip(cell.observed, shares or (1.0,), strict=True):
            terms.append(observed * math.log(observed / (both * share)) if observed else 0.0)
    # Williams' correction (Biometrika 1976): what counts that are not large add to the mean
    arms = sum(1 / share for share in shares) - 1 if shares else 1.0
    correction = 1 + arms * (inverse - 1) / (6 * num_all * df)
    statistic = max(2 * math.fsum(terms), 0.0) / correction
    return GTest(statistic, df, _chi2_sf(statistic, df), len(cells), num_first, num_second)


def _chi2_sf(x: float, df: float) -> float:
    """Give the chance that a chi-square variable is at least x."""
    half = torch.tensor([df / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _noncentral_sf(x: float, df: int, noncentrality: float) -> float:
    """The same with a noncentrality: a Poisson mixture of df + 2j degrees of freedom."""
    mean = noncentrality / 2
    j = torch.arange(int(mean + 12 * math.sqrt(mean) + 60), dtype=torch.float64)
    weights = (torch.xlogy(j, torch.full_like(j, mean)) - mean - torch.lgamma(j + 1)).exp()
    tails = torch.special.gammaincc(df / 2 + j, torch.full_like(j, x / 2))
    return float((weights * tails).sum())


def _noncentrality(df: int, threshold_p: float, power: float) -> float:
    """Find the noncentrality at which the test fails with probability `power`."""
    assert df > 0, "with one cell nothing can be caught"
    assert 0 < threshold_p < power < 1, "chances of a failure: without a difference, and with one"
    limit = _bisect(lambda x: threshold_p - _chi2_sf(x, df))
    return _bisect(lambda noncentrality: _noncentral_sf(limit, df, noncentrality) - power)


def _bisect(rising: Callable[[float], float]) -> float:
    """Find the upper end of where a rising function of x >= 0 crosses 0."""
    low, high = 0.0, 1.0
    while rising(high) < 0:
        low, high = high, 2 * high
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
