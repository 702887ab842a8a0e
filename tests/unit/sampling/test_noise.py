"""Noise: uniform, independent between seeds, positions and streams, and the same for ever."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from forerun.sampling import Stream, uniforms

FIVE_SIGMA = stats.norm.sf(5)
SIDE = 512


def grid(seed_step: int = 0, position_step: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Give every pair of SIDE adjacent seeds and SIDE adjacent positions."""
    seeds, positions = np.meshgrid(
        np.arange(SIDE, dtype=np.uint64) + np.uint64(seed_step),
        np.arange(SIDE, dtype=np.int64) + position_step,
    )
    return seeds.ravel(), positions.ravel()


def pair_p_value(first: torch.Tensor, second: torch.Tensor, bins: int = 16) -> float:
    """Test that pairs fill the unit square evenly."""
    cells = (first * bins).long() * bins + (second * bins).long()
    counts = torch.bincount(cells, minlength=bins * bins).numpy()
    return float(stats.chisquare(counts).pvalue)


@pytest.mark.parametrize("stream", Stream)
def test_values_fill_the_unit_interval_evenly(stream: Stream):
    values = uniforms(*grid(), stream)
    assert values.dtype == torch.float64
    assert float(values.min()) >= 0
    assert float(values.max()) < 1
    counts = torch.bincount((values * 1024).long(), minlength=1024).numpy()
    assert stats.chisquare(counts).pvalue > FIVE_SIGMA
    low_bits = (values * 2.0**53).long() & 1023  # the hash must be good to its last bit
    assert stats.chisquare(torch.bincount(low_bits, minlength=1024).numpy()).pvalue > FIVE_SIGMA


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(Stream, 2)))
def test_streams_are_independent(one: Stream, other: Stream):
    assert pair_p_value(uniforms(*grid(), one), uniforms(*grid(), other)) > FIVE_SIGMA


@pytest.mark.parametrize(
    ("seed_step", "position_step"),
    list(itertools.product([0, 1, 2, 1 << 32, 1 << 63], [0, 1, 2, 1 << 20]))[1:],
)
def test_neighbours_are_independent(seed_step: int, position_step: int):
    here = uniforms(*grid(), Stream.TARGET)
    there = uniforms(*grid(seed_step, position_step), Stream.TARGET)
    assert pair_p_value(here, there) > FIVE_SIGMA


def test_the_next_seed_is_not_the_next_position():
    seeds, positions = grid()
    assert len(np.unique(uniforms(seeds, positions, Stream.TARGET).numpy())) == SIDE * SIDE


def test_another_origin_is_other_noise():
    seeds, positions = grid()
    plain = uniforms(seeds, positions, Stream.ACCEPT)
    by_origin = [
        uniforms(seeds, positions, Stream.ACCEPT, np.full_like(positions, origin))
        for origin in (0, 1, 7)
    ]
    for one, other in itertools.combinations([plain, *by_origin], 2):
        assert pair_p_value(one, other) > FIVE_SIGMA


def test_a_shared_stream_is_seen():
    """Negative control: two streams that share one value in fifty."""
    one, other = uniforms(*grid(), Stream.DRAFT), uniforms(*grid(), Stream.RECOVER)
    shared = torch.arange(len(one)) % 50 == 0
    assert pair_p_value(one, torch.where(shared, one, other)) < FIVE_SIGMA


def test_values_do_not_depend_on_the_batch():
    seeds, positions = grid()
    values = uniforms(seeds, positions, Stream.TARGET)
    order = np.random.default_rng(0).permutation(len(seeds))[:1000]
    picked = uniforms(seeds[order], positions[order], Stream.TARGET)
    assert torch.equal(picked, values[torch.from_numpy(order)])
    alone = uniforms(seeds[order[:1]], positions[order[:1]], Stream.TARGET)
    assert torch.equal(alone, picked[:1])
    square = uniforms(seeds.reshape(SIDE, SIDE), positions.reshape(SIDE, SIDE), Stream.TARGET)
    assert torch.equal(square.ravel(), values)


def test_values_never_change():
    """Golden values, from the definition in Python integers: seeded results outlive versions."""
    seeds = np.array([0, 0, 1, 2**64 - 1, 1234567890123456789], dtype=np.uint64)
    positions = np.array([0, 1, 0, 5, 131071], dtype=np.int64)
    for stream in Stream:
        expected = [by_hand(int(s), int(p), stream) for s, p in zip(seeds, positions, strict=True)]
        assert uniforms(seeds, positions, stream).tolist() == expected
    assert uniforms(seeds, positions, Stream.TARGET).tolist() == GOLDEN_TARGET


def by_hand(seed: int, position: int, stream: Stream) -> float:
    def mix(state: int) -> int:
        state %= 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    state = mix(seed + 0x9E3779B97F4A7C15)
    state = mix(state + (position + 1) * 0x9E3779B97F4A7C15)
    state = mix(state + (int(stream) + 1) * 0xD1342543DE82EF95)
    return (state >> 11) / 2**53


# the pairs of test_values_never_change
GOLDEN_TARGET = [
    0.990634439616847,
    0.28605847478259117,
    0.2879228069387234,
    0.5064524421246271,
    0.49404241362502066,
]
