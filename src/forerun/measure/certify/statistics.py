"""A certificate's statistics: a G-test against exact probabilities, and what it would catch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

__all__ = ["GTest", "compare_with_exact", "detectable_shift", "family_threshold"]

T = TypeVar("T", bound=Hashable)

LEAST_EXPECTED = 5.0  # counts of a cell, under which the chi-square law is a poor guide
STEPS = 60  # of a bisection


@dataclass(frozen=True, slots=True)
class GTest:
    """Counts against probabilities: 2 sum(O ln(O / E)), chi-square with df if they agree."""

    statistic: float
    df: int
    p_value: float
    num_cells: int  # after small ones were pooled
    num_samples: int


def compare_with_exact(counts: Mapping[T, int], exact: Mapping[T, float]) -> GTest:
    """Test counts against the probabilities that they should have.

    Cells that expect fewer than five counts are pooled into one; if that still expects too few, it
    joins the smallest other cell. A count where the probability is 0 is a certain difference.
    """
    total = sum(counts.values())
    if any(count and exact.get(key, 0.0) <= 0.0 for key, count in counts.items()):
        return GTest(math.inf, max(1, len(exact) - 1), 0.0, len(exact), total)
    cells = sorted(((total * p, counts.get(key, 0)) for key, p in exact.items()), reverse=True)
    kept = [cell for cell in cells if cell[0] >= LEAST_EXPECTED]
    rest = [cell for cell in cells if cell[0] < LEAST_EXPECTED]
    pooled = (sum(e for e, _ in rest), sum(o for _, o in rest))
    if pooled[0] >= LEAST_EXPECTED or not kept:
        kept.append(pooled)
    elif rest:
        kept[-1] = (kept[-1][0] + pooled[0], kept[-1][1] + pooled[1])
    statistic = 2 * sum(o * math.log(o / e) for e, o in kept if o)
    statistic = max(statistic, 0.0)  # the probabilities may add up to 1 + 1e-7
    df = max(1, len(kept) - 1)
    p_value = 1.0 if len(kept) == 1 else chi_square_tail(statistic, df)
    return GTest(statistic, df, p_value, len(kept), total)


def family_threshold(num_tests: int, family_error_rate: float) -> float:
    """Bonferroni: with p-values under this failing, all right tests pass but for that rate."""
    return family_error_rate / num_tests


def detectable_shift(num_samples: int, df: int, threshold_p: float, power: float) -> float:
    """Find the smallest total-variation shift which such a test catches with that power.

    A shift of total variation d moves |change| = 2 d in all. The test's noncentrality is
    n sum(change^2 / p); the shift that gives it least spreads the change in proportion to p over
    two halves of the mass, change = +-2 d p, so the noncentrality is at least 4 n d^2.
    """
    limit = chi_square_quantile(threshold_p, df)
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        caught = noncentral_tail(limit, df, 4 * num_samples * middle**2)
        low, high = (low, middle) if caught >= power else (middle, high)
    return high


def chi_square_tail(x: float, df: float) -> float:
    """P(X > x) of the chi-square law: the regularised upper incomplete gamma function."""
    half = torch.tensor([df / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi_square_quantile(tail: float, df: int) -> float:
    """Find x with P(X > x) = tail."""
    low, high = 0.0, 10.0 * df + 2000.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, df) > tail else (low, middle)
    return high


def noncentral_tail(x: float, df: int, noncentrality: float) -> float:
    """P(X > x) of the noncentral law: chi-square laws of df + 2 j, j Poisson distributed."""
    mean = noncentrality / 2
    if mean == 0:
        return chi_square_tail(x, df)
    reach = 12 * math.sqrt(mean) + 30
    j = torch.arange(max(0, int(mean - reach)), int(mean + reach) + 1, dtype=torch.float64)
    weights = torch.exp(j * math.log(mean) - mean - torch.lgamma(j + 1))
    tails = torch.special.gammaincc(df / 2 + j, torch.tensor(x / 2, dtype=torch.float64))
    return float((weights * tails).sum())
