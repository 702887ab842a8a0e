"""The certificate's enumeration says yes to the right rules, and no to all that are a little off.

`tests/unit/sampling` has an integrator of its own, for the functions below the rules.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch
from torch import Tensor

from forerun.measure.certify import enumeration
from forerun.measure.certify.enumeration import check_rule, check_wrong_rules
from forerun.measure.certify.wrong import WRONG_RULES
from forerun.sampling import RULES, FilterParams, Noise
from forerun.types import Outcome, Proposal


@pytest.mark.parametrize("name", RULES)
def test_rule_is_exact(name: str):
    check = check_rule(name, "quick")
    assert (check.exact, check.largest_error) == (True, 0)
    assert check.rule == name
    assert check.num_models >= 64
    assert check.num_cells > 2000
    # the same again: what was checked does not hang on chance
    assert check_rule(name, "quick") == check


def test_wrong_rules_are_not():
    checks = check_wrong_rules("quick")
    assert list(checks) == list(WRONG_RULES)
    for name, check in checks.items():
        assert check.rule == name
        assert not check.exact
        assert check.largest_error > Fraction(1, 200)


def errors(run: Callable[..., Outcome], name: str, size: int, length: int, sampled: bool):
    """Check a rule where another one of that name would change, on two models."""
    rng = random.Random(f"{name} {size} {length}")
    shape = enumeration._SHAPES[name]
    cases = [enumeration._random_case(size, length, 1, sampled, shape, rng) for _ in range(2)]
    return cases, enumeration._check(name, run, cases, rng)


@pytest.mark.parametrize("name", ["residual_forgotten", "inverted_ratio", "bonus_from_draft"])
def test_an_error_is_what_it_is_by_hand(name: str):
    """One draft token: what comes out is a line of algebra."""
    cases, check = errors(WRONG_RULES[name][0], name, 3, 1, sampled=True)
    largest = Fraction(0)
    for case in cases:
        p, q = case.p[()], case.q[()]
        ratio = [a / b for a, b in zip(p, q, strict=True)]
        keep = [min(1, 1 / r if name == "inverted_ratio" else r) for r in ratio]
        kept = [b * h for b, h in zip(q, keep, strict=True)]
        residual = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
        source = p if name == "residual_forgotten" else [r / sum(residual) for r in residual]
        recovered = [(1 - sum(kept)) * s for s in source]
        for x, y in product(range(3), repeat=2):
            then = case.p[(x,)][y]
            bonus = q[y] if name == "bonus_from_draft" else then
            joint = kept[x] * bonus + recovered[x] * then
            largest = max(largest, abs(joint - p[x] * then))
    assert check.largest_error == largest > 0


# --- small mistakes in right rules ---------------------------------------------------------------

Change = Callable[[FilterParams, Proposal, Noise], tuple[FilterParams, Proposal, Noise]]


def nothing(params: FilterParams, proposal: Proposal, noise: Noise):
    return params, proposal, noise


def accepts_a_little_less(params: FilterParams, proposal: Proposal, noise: Noise):
    return params, proposal, replace(noise, accept=noise.accept + 2e-4)


def recovers_a_little_off(params: FilterParams, proposal: Proposal, noise: Noise):
    return params, proposal, replace(noise, recover=(noise.recover + 2e-4).clamp_max(1 - 1e-9))


def recovers_with_other_noise(params: FilterParams, proposal: Proposal, noise: Noise):
    starts = (proposal.lengths + 1).cumsum(0) - 1
    return params, proposal, replace(noise, recover=noise.target[starts])


def a_little_warmer(params: FilterParams, proposal: Proposal, noise: Noise):
    return replace(params, temperatures=params.temperatures * 1.001), proposal, noise


def forgets_that_it_was_sampled(params: FilterParams, proposal: Proposal, noise: Noise):
    return params, replace(proposal, probs=None), noise


def changed(name: str, change: Change) -> Callable[..., Outcome]:
    def rule(logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise) -> Outcome:
        return RULES[name](logits, *change(params, proposal, noise))

    return rule


@pytest.mark.parametrize("name", ["token", "block"])
@pytest.mark.parametrize(
    "change",
    [
        accepts_a_little_less,
        recovers_a_little_off,
        recovers_with_other_noise,
        a_little_warmer,
        forgets_that_it_was_sampled,
    ],
)
def test_a_small_mistake_is_found(name: str, change: Change):
    assert errors(changed(name, nothing), name, 3, 3, sampled=True)[1].exact
    assert not errors(changed(name, change), name, 3, 3, sampled=True)[1].exact


def test_a_small_mistake_in_samples_is_found():
    def late(params: FilterParams, proposal: Proposal, noise: Noise):
        return params, proposal, replace(noise, target=(noise.target + 2e-4).clamp_max(1 - 1e-9))

    assert errors(changed("point_mass", nothing), "point_mass", 3, 3, sampled=False)[1].exact
    assert not errors(changed("point_mass", late), "point_mass", 3, 3, sampled=False)[1].exact


def test_a_token_that_the_vocabulary_lacks_is_found():
    def stray(logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise) -> Outcome:
        right = RULES["token"](logits, params, proposal, noise)
        return replace(right, next_tokens=torch.full_like(right.next_tokens, 2))

    assert errors(stray, "token", 2, 2, sampled=True)[1].largest_error == 1
