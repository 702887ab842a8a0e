"""benchmarks/drafters.py: its arithmetic, and a race of tiny models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forerun.config import SpeculationConfig
from forerun.measure.certify.bench import CertifyBench
from forerun.measure.prompts import DemoPrompt
from forerun.params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from drafters import ALL, PLAIN, Contestant, Race, Runs, summary

PROMPTS = [
    DemoPrompt("even", ({"role": "user", "content": "the quick brown fox, the quick brown"},)),
    DemoPrompt("odd", ({"role": "user", "content": "def add(a, b): return a + b"},)),
]


def test_contestants_are_read_as_they_are_written():
    assert Contestant.parse("ngram") == Contestant("ngram")
    own = Contestant.parse("eagle:heads/mine")
    assert (own, str(own)) == (Contestant("eagle", "heads/mine"), "eagle:mine")
    assert own.config(7) == SpeculationConfig(drafter="eagle", model="heads/mine", max_draft=7)


def test_acceptance_counts_only_drafts_that_came_so_far():
    #      drafted, kept
    runs = Runs(rows=[(3, 3), (3, 1), (2, 2), (1, 0), (0, 0)])
    # position 1: 4 drafts, 3 held; 2: of those 3, 2 held; 3: of (3, 3) alone, 1 held
    assert runs.acceptance() == [3 / 4, 2 / 3, 1.0]
    assert Runs(rows=[(0, 0)]).acceptance() == []


def test_ratios_are_those_of_the_same_round():
    fast, plain = Runs(), Runs()
    for runs, seconds in ((plain, (1.0, 2.0, 4.0)), (fast, (0.5, 1.0, 1.0))):
        for number, taken in enumerate(seconds):
            runs.seconds[number], runs.num_timed[number] = taken, 8
        runs.num_emitted, runs.num_steps, runs.draft_s = 27, 9, 0.9
    found = summary(fast, plain)
    assert found["x_plain"] == 2.0
    assert found["x_plain_spread"] == [2.0, 4.0]
    assert found["tokens_per_s"] == 8.0
    assert found["mean_acceptance_length"] == 3.0
    assert found["draft_cost_ratio"] == pytest.approx(0.1 / 0.25)


def test_a_race(repeating, capsys):
    options = {"device": "cpu", "kernels": "torch", "dtype": "float32", "num_threads": 1}
    plain = SpeculationConfig(drafter=PLAIN)
    with CertifyBench(str(repeating.folder), plain, enable_prefix_caching=False, **options) as own:
        race = Race(own, [Contestant("ngram"), Contestant("auto")], 7)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        table = race.run(PROMPTS, params, 2)
    assert set(table) == {"even", "odd", ALL}
    for group, own in table.items():
        assert list(race.drafters) == [PLAIN, "ngram", "auto"]
        for name in race.drafters:
            each = summary(own[name], own[PLAIN])
            assert own[name].num_emitted == 2 * 40 * (2 if group == ALL else 1)
            assert each["faults"] == {}
            assert (each["mean_acceptance_length"] > 1) == (name != PLAIN)
            assert bool(each["acceptance_by_position"]) == (name != PLAIN)
        assert own["ngram"].num_steps < own[PLAIN].num_steps
