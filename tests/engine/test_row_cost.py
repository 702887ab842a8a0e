"""What one more row costs is measured once, and drafters hear of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reference.tiny_engine import Bench

from forerun.cache.kv_cache import CacheShape
from forerun.draft.base import NoDrafter
from forerun.engine import setup
from forerun.params import SamplingParams
from forerun.types import Proposal


class Clocked:
    """A decoder whose passes take a known time, on a clock of its own; now and then a bit more."""

    device = torch.device("cpu")

    def __init__(self, base_s: float, row_s: float, parameters: int = 10**9) -> None:
        self.config = SimpleNamespace(num_parameters=parameters)
        self.now_s, self.passes = 0.0, 0
        self._base_s, self._row_s = base_s, row_s

    def cache_shape(self, block_size: int) -> CacheShape:
        return CacheShape(1, 1, 32, block_size, torch.float32)

    def forward(self, step, cache) -> None:
        self.passes += 1
        busy = 5.0 if self.passes in (2, 3) else 0.0  # something else ran
        self.now_s += self._base_s + self._row_s * len(step.token_ids) + busy


@pytest.mark.parametrize(("base_s", "row_s"), [(1.0, 0.0), (0.98, 0.02), (0.9, 0.1), (0.0, 1.0)])
@pytest.mark.parametrize("block_size", [2, 32])
def test_the_cost_of_a_row_is_that_of_a_pass_over_one(monkeypatch, base_s, row_s, block_size):
    decoder = Clocked(base_s, row_s)
    monkeypatch.setattr(setup.time, "perf_counter", lambda: decoder.now_s)
    pass_s, row_cost = setup.measure_passes(decoder, block_size)
    assert row_cost == pytest.approx(row_s / (base_s + row_s))
    assert pass_s == pytest.approx(base_s + row_s)


def test_small_models_are_not_measured():
    decoder = Clocked(0.0, 1.0, parameters=1000)
    assert setup.measure_passes(decoder, 32) == (0, 0)
    assert decoder.passes == 0


def test_drafters_hear_of_it(tiny, monkeypatch):
    heard = []

    class Listener(NoDrafter):
        def propose(self, requests):
            heard.extend((each.pass_s, each.row_cost) for each in requests)
            return Proposal.empty(len(requests))

    monkeypatch.setattr(setup, "measure_passes", lambda *_: (0.5, 0.125))
    bench = Bench(tiny.folder, Listener())
    bench.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert heard
    assert set(heard) == {(0.5, 0.125)}
