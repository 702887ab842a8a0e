"""The torch form of the filters, which other devices use: its cuts to the last weight.

On the CPU the compiled kernels answer, so these call the torch form by its own name.
"""

from __future__ import annotations

import pytest
import torch
from reference.filters_slow import filtered_row

from forerun.params import SamplingParams
from forerun.sampling import FilterParams
from forerun.sampling.filters import UNIT, torch_weights
from forerun.sampling.sampler import torch_sample


def weights_of(logits: list[float], **options: float) -> list[int]:
    params = FilterParams.from_params([SamplingParams(**options)])
    return torch_weights(torch.tensor([logits]), params)[0].tolist()


def test_what_is_dropped_weighs_nothing_at_all():
    """A weight of 1 in 2^42 would never be seen in statistics, and would be wrong."""
    logits = [3.0, 2.0, 1.0, 0.0, -1.0]
    assert [w > 0 for w in weights_of(logits, top_k=2)] == [True, True, False, False, False]
    assert weights_of(logits, top_k=2)[2:] == [0, 0, 0]
    assert weights_of(logits, top_p=0.8)[2:] == [0, 0, 0]
    assert weights_of(logits, min_p=0.3)[2:] == [0, 0, 0]
    assert weights_of(logits, temperature=0) == [int(UNIT), 0, 0, 0, 0]


def test_top_k_of_one_is_the_likeliest_and_its_ties():
    assert weights_of([1.0, 4.0, 2.0], top_k=1) == [0, int(UNIT), 0]
    assert weights_of([4.0, 4.0, 2.0], top_k=1) == [int(UNIT), int(UNIT), 0]


def test_min_p_keeps_what_lies_just_on_it():
    assert weights_of([2.0, 2.0, 1.9], min_p=1.0) == [int(UNIT), int(UNIT), 0]


def test_top_p_stops_where_the_mass_is_just_enough():
    half = weights_of([0.0, 0.0], top_p=0.5)
    assert half == [int(UNIT), int(UNIT)], "ties stay"
    assert weights_of([5.0, -30.0], top_p=0.5)[1] == 0


@pytest.mark.parametrize("top_k", [0, 1, 3, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_it_keeps_what_the_slow_twin_keeps(top_k, top_p, min_p):
    dice = torch.Generator().manual_seed(top_k)
    logits = torch.randn(40, 30, generator=dice) * 2
    rows = [SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)] * 40
    weights = torch_weights(logits, FilterParams.from_params(rows))
    compared = 0
    for row, own in zip(logits.tolist(), weights, strict=True):
        slow = filtered_row(row, 0.7, top_k, top_p, min_p)
        if slow.margin > 1e-5:  # else rounding may rightly decide otherwise
            compared += 1
            probs = (own.double() / own.sum()).tolist()
            assert [p > 0 for p in probs] == [p > 0 for p in slow.probs]
            assert probs == pytest.approx(slow.probs, abs=1e-6)
    assert compared > 30


def test_a_greedy_row_among_others_takes_its_argmax():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 1.0, 0.0]])
    rows = [SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_k=2)]
    noise = torch.tensor([0.999, 0.999], dtype=torch.float64)
    tokens = torch_sample(logits, FilterParams.from_params(rows), noise)
    assert tokens.tolist() == [1, 1]
