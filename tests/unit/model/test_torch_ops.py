"""Attention over groups of requests against its slow twin, and how steps are cut into groups."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.torch_ops_slow import LoopOps

from forerun.cache.kv_cache import CacheShape, KVCache
from forerun.model import paged
from forerun.model.ops import AttentionShape, Rotary
from forerun.model.paged import HostStep, Piece, cut, plan_pass, sort_into_groups
from forerun.model.torch_ops import TorchOps
from forerun.types import ForwardInput

CPU = torch.device("cpu")
MAX_POSITIONS = 700
SPANS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 70))
    | st.tuples(st.integers(1, 3), st.integers(0, 600)),
    min_size=1,
    max_size=7,
)


def make_step(spans: list[tuple[int, int]], block_size: int, seed: int) -> ForwardInput:
    """Lay out requests (rows, positions before them) at scattered blocks."""
    random = np.random.default_rng(seed)
    needs = [-(-(rows + past) // block_size) for rows, past in spans]
    free = 1 + random.permutation(sum(needs))
    tables = np.zeros((len(spans), max(needs)), np.int64)
    for row, count in zip(tables, needs, strict=True):
        row[:count], free = free[:count], free[count:]
    positions = np.concatenate([np.arange(past, past + rows) for rows, past in spans])
    starts = np.cumsum([0, *[rows for rows, _ in spans]])
    count = len(positions)
    return ForwardInput(
        token_ids=torch.from_numpy(random.integers(0, 100, count)),
        positions=torch.from_numpy(positions),
        starts=torch.from_numpy(starts),
        block_tables=torch.from_numpy(tables),
        logit_rows=torch.arange(count),
        num_fine=count,
        num_sampling_rows=count,
    )


def make_cache(step: ForwardInput, shape: CacheShape, seed: int) -> KVCache:
    """Fill what lies before the step with numbers and everything else with NaN."""
    torch.manual_seed(seed)
    cache = KVCache(shape, int(step.block_tables.max()) + 2, CPU)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    firsts = step.positions[step.starts[:-1]].tolist()
    for layer in range(shape.num_layers):
        for table, past in zip(step.block_tables, firsts, strict=True):
            seen = torch.arange(past)
            keys, values = torch.randn(2, past, shape.num_kv_heads, shape.head_size).to(shape.dtype)
            cache.write(
                layer, table[seen // shape.block_size], seen % shape.block_size, keys, values
            )
    return cache


def attention(
    heads: int, groups: int, size: int, window: int | None, normed: bool
) -> AttentionShape:
    weights = [1 + 0.3 * torch.randn(size) if normed else None for _ in range(2)]
    return AttentionShape(heads, groups, size, window, *weights, norm_eps=1e-5)


def rotary(size: int) -> Rotary:
    return Rotary.from_frequencies(1e4 ** (-torch.arange(0, size, 2) / size), MAX_POSITIONS)


@settings(deadline=None, max_examples=60)
@given(
    spans=SPANS,
    block_size=st.sampled_from([4, 8, 32]),
    shape=st.sampled_from([(1, 1, 8), (4, 2, 16), (6, 2, 20), (8, 1, 32), (3, 3, 64)]),
    windows=st.tuples(*[st.sampled_from([None, 1, 2, 5, 33, 1000])] * 2),
    normed=st.booleans(),
    piece_rows=st.sampled_from([256, 7, 1]),
    limits=st.sampled_from([(1 << 26, 1 << 24), (1 << 12, 1 << 24), (1 << 26, 1 << 10)]),
    seed=st.integers(0, 1000),
)
def test_groups_attend_as_the_loop_does(
    spans, block_size, shape, windows, normed, piece_rows, limits, seed
):
    heads, groups, size = shape
    step = make_step(spans, block_size, seed)
    caches = [
        make_cache(step, CacheShape(2, groups, size, block_size, torch.float32), seed)
        for _ in range(2)
    ]
    layers = [attention(heads, groups, size, window, normed) for window in windows]
    qkvs = torch.randn(2, len(step.token_ids), (heads + 2 * groups) * size)
    results = []
    for make, cache in zip((LoopOps, TorchOps), caches, strict=True):
        ops = make(rotary(size))
        with (
            mock.patch.object(paged, "PIECE_ROWS", piece_rows),
            mock.patch.object(paged, "MAX_GATHERED", limits[0]),
            mock.patch.object(paged, "MAX_SCORES", limits[1]),
        ):
            ops.prepare(step, cache)
            results.append(
                torch.stack([ops.attend(i, layers[i], qkvs[i].clone()) for i in range(2)])
            )
    assert results[0].isfinite().all()
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=2e-6)
    # NaN stays where nobody wrote.
    torch.testing.assert_close(caches[0].keys, caches[1].keys, rtol=1e-5, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(caches[0].values, caches[1].values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 9])
def test_groups_attend_as_the_loop_does_in_16_bits(dtype, window):
    spans = [(1, 0), (1, 300), (5, 31), (20, 100), (70, 0), (3, 29)]
    step = make_step(spans, 32, seed=1)
    shape = CacheShape(1, 2, 24, 32, dtype)
    caches = [make_cache(step, shape, seed=1) for _ in range(2)]
    qkv = torch.randn(len(step.token_ids), 10 * 24).to(dtype)
    layer, results = attention(6, 2, 24, window, normed=False), []
    for make, cache in zip((LoopOps, TorchOps), caches, strict=True):
        ops = make(rotary(24))
        ops.prepare(step, cache)
        results.append(ops.attend(0, layer, qkv.clone()).float())
    # Roundings of the weights fall elsewhere.
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0.03)
    assert torch.equal(caches[0].values.isnan(), caches[1].values.isnan())


@pytest.mark.parametrize("place", ["keys", "values"])
def test_anothers_nan_stays_with_them(place):
    """Request 1 is poisoned where request 0's padding might look."""
    step = make_step([(1, 5), (3, 60)], 8, seed=2)
    shape = CacheShape(1, 1, 8, 8, torch.float32)
    step.block_tables[0, 1:] = step.block_tables[1, 0]
    cache = make_cache(step, shape, seed=2)
    getattr(cache, place)[:, step.block_tables[1, 0]] = torch.nan
    ops = TorchOps(rotary(8))
    ops.prepare(step, cache)
    result = ops.attend(0, attention(2, 1, 8, None, normed=False), torch.randn(4, 4 * 8))
    assert result[0].isfinite().all()
    assert result[1:].isnan().all()


# --- plans -------------------------------------------------------------------------------------


def host(spans: list[tuple[int, int]]) -> HostStep:
    return HostStep.of(make_step(spans, 32, seed=0))


def test_requests_are_cut_into_pieces():
    pieces = cut(host([(1, 4), (300, 10)]))
    assert pieces == [Piece(0, 0, 1, 5), Piece(1, 1, 256, 266), Piece(1, 257, 44, 310)]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 256), st.integers(0, 8000)), min_size=1, max_size=300),
    width=st.sampled_from([64, 1024]),
)
def test_groups_waste_little_and_fit(sizes, width):
    pieces = [Piece(i, 0, rows, rows + past) for i, (rows, past) in enumerate(sizes)]
    groups = sort_into_groups(pieces, 32, width)
    assert sorted(piece.request for group in groups for piece in group) == list(range(len(pieces)))
    for group in groups:
        rows = [piece.num_rows for piece in group]
        blocks = [-(-piece.length // 32) for piece in group]
        assert max(rows) <= max(2 * min(rows), paged.FEW_ROWS)
        assert max(blocks) <= 4 * min(blocks)
        gathered = len(group) * max(blocks) * 32
        assert len(group) == 1 or gathered * width <= paged.MAX_GATHERED
        assert len(group) == 1 or gathered * max(rows) <= paged.MAX_SCORES


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_says_where_every_row_is(seed):
    spans = [(1, 9), (30, 0), (2, 64), (1, 700), (17, 3), (1, 0)]
    step = make_step(spans, 8, seed)
    with mock.patch.object(paged, "PIECE_ROWS", 12):
        plan = plan_pass(step, 8, 64, CPU)
    rows = torch.cat([group.rows.flatten() for group in plan.groups])
    assert torch.equal(rows[plan.places], torch.arange(52))
    for group in plan.groups:
        assert torch.equal(group.positions, step.positions[group.rows])
        assert torch.equal(group.lengths, group.positions.amax(-1) + 1)
        for table, of in zip(group.tables, group.rows[:, 0], strict=True):
            own = step.block_tables[int((step.starts <= of).sum()) - 1]
            count = min(len(table), len(own))
            assert torch.equal(table[:count], own[:count])
    owners = torch.repeat_interleave(torch.arange(6), step.starts.diff())
    assert torch.equal(plan.blocks, step.block_tables[owners, step.positions // 8])
    assert torch.equal(plan.offsets, step.positions % 8)
