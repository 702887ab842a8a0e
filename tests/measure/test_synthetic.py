"""Acceptance at a given rate: what it keeps, and that nothing but Python has a name for it."""

from __future__ import annotations

import pytest
from reference.drafters import Fake
from reference.tiny_engine import Bench

from forerun.config import SpeculationConfig
from forerun.errors import ConfigError
from forerun.measure.synthetic import synthetic_acceptance
from forerun.params import SamplingParams


class Guess(Fake):
    def guess(self, request):
        return [1] * request.max_draft


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_drafts_are_kept_at_the_rate(tiny, prompts, rate):
    bench = Bench(tiny.folder, Guess(), max_draft=4, choose=synthetic_acceptance(rate))
    params = SamplingParams(temperature=1, max_tokens=150, ignore_eos=True, seed=3)
    bench.generate(prompts, params)
    stats = [each.stats for each in bench.seen]
    offered = sum(each.offered_by_position[0] for each in stats)
    kept = sum(each.accepted_by_position[0] for each in stats if each.accepted_by_position)
    assert offered > 200
    # Four standard deviations of so many draws.
    assert abs(kept / offered - rate) <= 4 * (rate * (1 - rate) / offered) ** 0.5
    reached = sum(each.offered_by_position[1] for each in stats) and kept
    second = sum(
        each.accepted_by_position[1] for each in stats if len(each.accepted_by_position) > 1
    )
    if 0 < rate < 1:
        assert abs(second / reached - rate) < 0.15


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_what_is_no_chance_is_refused(rate):
    with pytest.raises(ValueError, match="outside"):
        synthetic_acceptance(rate)


def test_no_configuration_has_a_name_for_it():
    with pytest.raises(ConfigError, match="accept_rule"):
        SpeculationConfig(accept_rule="synthetic")
