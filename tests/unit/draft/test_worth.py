"""The worth of drafts against brute force, and what load and costs do to it."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.draft.worth import (
    AHEAD,
    AHEAD_RATE,
    best_count,
    expected_tokens,
    least_chance,
    share_of_pass,
    worth,
)

CHANCES = st.lists(st.floats(0, 1), max_size=6)
COSTS = st.floats(0, 2)
SHARES = st.floats(0.01, 1)


def slow_expected(chances: list[float]) -> float:
    """Go through every way in which tokens hold or not, and count the first ones that do."""
    total = Fraction(0)
    for holds in product([True, False], repeat=len(chances)):
        weight = Fraction(1)
        for chance, held in zip(chances, holds, strict=True):
            weight *= Fraction(chance) if held else 1 - Fraction(chance)
        length = next((place for place, held in enumerate(holds) if not held), len(holds))
        total += weight * length
    return float(total)


@settings(max_examples=60, deadline=None)
@given(CHANCES)
def test_expected_tokens_are_those_of_all_outcomes(chances):
    assert expected_tokens(chances) == pytest.approx(slow_expected(chances))


@given(CHANCES, COSTS, SHARES, COSTS)
def test_the_best_count_is_the_best_of_all(chances, row_cost, share, paid):
    count, value = best_count(chances, row_cost, share, paid)
    every = [
        worth(sum(chances[:length]), paid + row_cost * length, share)
        for length in range(len(chances) + 1)
    ]
    assert value == pytest.approx(max(every))
    assert every[count] == pytest.approx(max(every))


@given(CHANCES, COSTS, SHARES)
def test_what_is_less_likely_than_the_least_chance_is_never_drafted(chances, row_cost, share):
    falling = sorted(chances, reverse=True)
    count, _ = best_count(falling, row_cost, share)
    least = least_chance(row_cost, share)
    assert all(chance >= least * (1 - 1e-9) for chance in falling[:count])


def test_plain_decoding_is_one_token_for_one_pass_beside_what_is_ahead():
    assert worth(0, 0) == pytest.approx((1 + AHEAD) / (1 + AHEAD / AHEAD_RATE))
    assert worth(1, 1 + AHEAD / AHEAD_RATE) < worth(0, 0) * 2


def test_free_rows_are_all_taken_and_dear_ones_as_far_as_they_pay():
    chances = [0.9, 0.7, 0.5, 0.3, 0.1]
    assert best_count(chances, 0.0)[0] == 5
    assert best_count(chances, 0.14)[0] == 3
    assert best_count(chances, 0.3)[0] == 2
    assert best_count(chances, 0.9)[0] == 0
    assert best_count([], 0.1) == (0, worth(0, 0))


def test_what_is_paid_already_makes_rows_look_cheaper():
    chances = [0.4, 0.2]
    assert best_count(chances, 0.2)[0] == 1
    assert best_count(chances, 0.2, 1.0, paid=2.0)[0] == 2


def test_in_company_a_row_must_be_surer():
    alone, company = share_of_pass(1, 0.14), share_of_pass(8, 0.14)
    assert alone == 1
    assert company == pytest.approx((1 + 7 * 0.14) / 8)
    chances = [0.6, 0.5]
    assert best_count(chances, 0.14, alone)[0] == 2
    assert best_count(chances, 0.14, company)[0] == 0
    assert best_count([0.95], 0.14, company)[0] == 1
