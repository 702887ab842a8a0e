"""The compiled kernels against their slow twin, and the bits of a row in any company."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numba
import numpy as np
import pytest
from reference.attention_slow import (
    Array,
    attend_row,
    bf16_bits,
    from_bits,
    norm_row,
    rotate_head,
    silu_multiply_row,
)

from forerun.kernels import attention, pointwise
from forerun.kernels.tiles import TILE_ROWS

BLOCK = 32
EVERYTHING = 1 << 40
FORMATS = ["bfloat16", "float32"]
CONTEXTS = (1, 31, 32, 33, 255, 256, 257, 512, 700)
BF16_HALF_STEP = 2.0**-8  # largest relative error of one rounding
ROWS_DIFFER = "bits of a row depend on its company"


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = numba.get_num_threads()
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
    yield
    numba.set_num_threads(before)


def stored(values: Array, dtype: str) -> Array:
    return bf16_bits(values) if dtype == "bfloat16" else values.astype(np.float32)


def nan_like(shape: Sequence[int], dtype: str) -> Array:
    return stored(np.full(shape, np.nan), dtype) if dtype == "float32" else np.full(
        shape, 0x7FC0, np.uint16
    )  # fmt: skip


@dataclass(frozen=True)
class Span:
    """Rows of one request: the last `count` of its `context` positions."""

    context: int
    count: int


class World:
    """Requests with keys and values in scattered blocks; every other block is NaN."""

    def __init__(
        self, dtype: str, size: int, groups: int, contexts: Sequence[int], seed: int = 0
    ) -> None:
        self.dtype, self.size, self.groups = dtype, size, groups
        self.random = np.random.default_rng(seed)
        pack = 2 if dtype == "bfloat16" else 1
        counts = [-(-context // BLOCK) for context in contexts]
        total = 1 + 2 * sum(counts)
        self.keys = nan_like((total, groups, size // pack, BLOCK, pack), dtype)
        self.values = nan_like((total, groups, BLOCK // pack, size, pack), dtype)
        free = 1 + self.random.permutation(total - 1)
        ends = np.cumsum(counts)
        self.tables = [list(free[end - n : end]) for end, n in zip(ends, counts, strict=True)]
        for block in itertools.chain.from_iterable(self.tables):
            self.keys[block] = self.draw(self.keys.shape[1:])
            self.values[block] = self.draw(self.values.shape[1:])

    def draw(self, shape: Sequence[int], scale: float = 1.0) -> Array:
        return stored(self.random.standard_normal(shape) * scale, self.dtype)

    def key(self, request: int, group: int, position: int) -> Array:
        block = self.tables[request][position // BLOCK]
        return from_bits(self.keys[block, group, :, position % BLOCK]).reshape(-1)

    def value(self, request: int, group: int, position: int) -> Array:
        block, offset, pack = self.tables[request][position // BLOCK], position % BLOCK, (
            self.values.shape[-1]
        )  # fmt: skip
        return from_bits(self.values[block, group, offset // pack, :, offset % pack])

    def attend(
        self,
        spans: Sequence[tuple[int, Span]],
        queries: Sequence[Array],
        window: int,
        max_tokens: int = 64,
        out_format: str = "float32",
        merge: Callable[..., None] = attention.merge,
    ) -> list[Array]:
        """Run the kernels over spans of requests; queries [count, H, D] float32 of each."""
        share = queries[0].shape[1] // self.groups
        positions = np.concatenate(
            [np.arange(span.context - span.count, span.context) for _, span in spans]
        )
        starts = np.cumsum([0, *[span.count for _, span in spans]])
        width = max(len(self.tables[request]) for request, _ in spans)
        tables = np.zeros((len(spans), width), np.int64)
        for row, (request, _) in enumerate(spans):
            tables[row, : len(self.tables[request])] = self.tables[request]
        units, token_units, num_rows = attention.plan_units(
            starts, positions, positions + 1, share, self.groups, max_tokens
        )
        num_tokens = len(positions)
        flat = np.concatenate(queries).reshape(num_tokens, self.groups, share, self.size)
        padded = np.full((self.groups, num_tokens * share + TILE_ROWS, self.size), 7, np.float32)
        padded[:, : num_tokens * share] = flat.transpose(1, 0, 2, 3).reshape(
            self.groups, num_tokens * share, self.size
        )
        partial = np.full((num_rows, self.size), np.nan, np.float32)
        tops, totals = (np.full(num_rows, np.nan, np.float32) for _ in range(2))
        attention.attend(
            padded,
            self.keys,
            self.values,
            tables,
            positions,
            units,
            window,
            positions + 1,
            np.zeros((num_tokens, 0), np.int64),
            partial,
            tops,
            totals,
        )
        shape = (num_tokens, self.groups * share * self.size)
        out = np.empty(shape, np.float32 if out_format == "float32" else np.uint16)
        merge(units, token_units, self.groups, share, partial, tops, totals, out)
        return np.split(out, starts[1:-1])

    def slow(self, request: int, span: Span, queries: Array, window: int) -> Array:
        share = queries.shape[1] // self.groups
        rows = np.empty(queries.shape)
        for g in range(self.groups):
            keys = np.stack([self.key(request, g, p) for p in range(span.context)])
            values = np.stack([self.value(request, g, p) for p in range(span.context)])
            for t in range(span.count):
                position = span.context - span.count + t
                for h in range(g * share, (g + 1) * share):
                    query = queries[t, h].astype(np.float64)
                    rows[t, h] = attend_row(query, keys, values, position, window)
        return rows.reshape(span.count, -1)


def draw_queries(world: World, count: int, share: int, sharpness: float = 3.0) -> Array:
    shape = (count, world.groups * share, world.size)
    scale = sharpness / world.size**0.5
    return (world.random.standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    ("size", "share", "groups"), [(32, 1, 2), (64, 3, 3), (128, 8, 1), (256, 2, 1), (96, 4, 2)]
)
@pytest.mark.parametrize("window", [EVERYTHING, 1, 5, 32, 200, 300])
def test_attention_equals_its_slow_twin(dtype, size, share, groups, window):
    world = World(dtype, size, groups, CONTEXTS, seed=size + share)
    spans = [
        (request, Span(context, min(context, count)))
        for request, (context, count) in enumerate(
            zip(CONTEXTS, [1, 3, 17, 2, 66, 1, 70, 5, 9], strict=True)
        )
    ]
    queries = [draw_queries(world, span.count, share) for _, span in spans]
    found = world.attend(spans, queries, window)
    for (request, span), query, rows in zip(spans, queries, found, strict=True):
        expected = world.slow(request, span, query, window)
        assert np.abs(rows - expected).max() < 2e-5, f"context {span.context}"


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("window", [EVERYTHING, 1, 8, 31, 250, 257])
def test_no_place_of_a_chunk_leaves_memory(dtype, window):
    # A chunk may start anywhere; units that lie in several segments see nothing of some of them.
    world = World(dtype, 32, 1, [1100])
    for start, count in [(0, 64), (193, 64), (200, 64), (255, 64), (256, 1), (449, 130), (700, 1),
                         (767, 2), (1000, 100), (201, 899)]:  # fmt: skip
        span = Span(start + count, count)
        query = draw_queries(world, count, 2)
        (rows,) = world.attend([(0, span)], [query], window)
        expected = world.slow(0, span, query, window)
        assert np.abs(rows - expected).max() < 2e-5, f"positions {start} to {start + count}"


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, 1e4])
def test_flat_and_needle_sharp_attention(scale):
    world = World("float32", 64, 1, [700])
    query = draw_queries(world, 4, 2, sharpness=scale)
    span = Span(700, 4)
    (rows,) = world.attend([(0, span)], [query], EVERYTHING)
    expected = world.slow(0, span, query, EVERYTHING)
    # A score's own float32 rounding moves its weight by as much.
    assert np.abs(rows - expected).max() < 2e-5 * max(1.0, scale)


def test_rounding_of_the_result_is_to_nearest():
    world = World("bfloat16", 64, 2, [300])
    query = draw_queries(world, 8, 2)
    exact = world.attend([(0, Span(300, 8))], [query], EVERYTHING)[0]
    rounded = world.attend([(0, Span(300, 8))], [query], EVERYTHING, out_format="bfloat16")[0]
    assert np.array_equal(rounded, bf16_bits(exact))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("window", [EVERYTHING, 40])
@pytest.mark.parametrize("share", [1, 3])
@pytest.mark.parametrize("context", [16, 40, 264, 520])
def test_a_row_has_the_same_bits_in_any_company(dtype, window, share, context):
    contexts = [context, 90, 300, 1]
    world = World(dtype, 64, 2, contexts)
    query = draw_queries(world, 16, share)
    alone = np.concatenate(
        [
            world.attend([(0, Span(context - 15 + t, 1))], [query[t : t + 1]], window)[0]
            for t in range(16)
        ]
    )
    for count in (2, 3, 4, 5, 8, 13, 16):  # the last `count` rows as one block
        (rows,) = world.attend([(0, Span(context, count))], [query[16 - count :]], window)
        assert np.array_equal(rows, alone[16 - count :]), ROWS_DIFFER
    strangers = [(1, Span(90, 7)), (0, Span(context, 16)), (2, Span(300, 65)), (3, Span(1, 1))]
    queries = [
        query if request == 0 else draw_queries(world, span.count, share)
        for request, span in strangers
    ]
    for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 7):
        found = world.attend([strangers[i] for i in order], [queries[i] for i in order], window)
        assert np.array_equal(found[order.index(1)], alone), ROWS_DIFFER


@pytest.mark.parametrize("out_format", FORMATS)
@pytest.mark.parametrize("share", [1, 3])
def test_both_merges_give_the_same_bits(out_format, share):
    world = World("bfloat16", 64, 2, [700])
    query = draw_queries(world, 700, share)
    serial, threads = (
        world.attend([(0, Span(700, 700))], [query], EVERYTHING, 64, out_format, merge)[0]
        for merge in (attention.merge, attention.merge_parallel)
    )
    assert np.array_equal(serial, threads), ROWS_DIFFER


def test_what_lies_beyond_a_request_does_not_matter():
    world = World("bfloat16", 32, 1, [41])
    query = draw_queries(world, 2, 2)
    (before,) = world.attend([(0, Span(41, 2))], [query], EVERYTHING)
    last = world.tables[0][-1]
    world.keys[last, :, :, 41 % BLOCK :] = bf16_bits(np.array(3e38))
    world.values[last, :, 42 % BLOCK // 2 :, :, :] = bf16_bits(np.array(-3e38))
    (after,) = world.attend([(0, Span(41, 2))], [query], EVERYTHING)
    assert np.array_equal(before, after)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("size", "share", "groups"), [(32, 1, 3), (64, 3, 1), (96, 8, 2), (256, 2, 1)]
)
@pytest.mark.parametrize("kernel", ["rotate", "rotate_parallel"])
def test_rotation_equals_its_slow_twin(dtype, normed, size, share, groups, kernel):
    world = World(dtype, size, groups, [700])
    heads, eps, rounds = share * groups, 1e-6, dtype == "bfloat16"
    positions = np.array([0, 1, 31, 32, 255, 256, 699])
    frequencies = 1.0 / 10000.0 ** (np.arange(0, size, 2) / size)
    angles = np.outer(np.arange(700), frequencies)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    qkv = world.draw((len(positions), (heads + 2 * groups) * size), 2.0)
    weights = [world.draw((size if normed else 0,)) for _ in range(2)]
    slots = np.array([world.tables[0][p // BLOCK] * BLOCK + p % BLOCK for p in positions])
    queries = np.full((groups, len(positions) * share + TILE_ROWS, size), 7, np.float32)
    keys, values = world.keys.copy(), world.values.copy()
    getattr(attention, kernel)(
        qkv, cos, sin, weights[0], weights[1], np.float32(eps), positions, slots,
        world.keys, world.values, queries,
    )  # fmt: skip
    rows = from_bits(qkv).reshape(len(positions), -1, size)
    tolerance = (
        BF16_HALF_STEP * 3 if rounds and normed else BF16_HALF_STEP * 1.01 if rounds else 1e-6
    )

    def expect(head: Array, weight: Array, position: int) -> Array:
        if normed:
            head = from_bits(stored(norm_row(head, from_bits(weight), eps, rounds), dtype))
        return rotate_head(head, position, frequencies)

    def near(found: Array, expected: Array) -> None:
        # Pairs cancel: an error is measured by the size of its head's largest element.
        scale = np.abs(expected) if rounds and not normed else np.abs(expected).max()
        assert (np.abs(found - expected) <= tolerance * scale + 2e-6).all()

    for t, position in enumerate(positions):
        for h in range(heads):
            found = queries[h // share, t * share + h % share] * size**0.5
            near(found, expect(rows[t, h], weights[0], position))
        for g in range(groups):
            near(world.key(0, g, position), expect(rows[t, heads + g], weights[1], position))
            assert np.array_equal(world.value(0, g, position), rows[t, heads + groups + g])
    assert (queries[:, -TILE_ROWS:] == 7).all()
    # Nothing but the slots of this step was written.
    changed_keys = (world.keys != keys) & ~(np.isnan(from_bits(keys)))
    blocks, offsets = changed_keys.any((1, 2, 4)).nonzero()
    assert set(blocks * BLOCK + offsets) <= set(slots)
    world.values[world.values != values] = 0
    pack = values.shape[-1]
    blocks, pairs, halves = (
        (world.values != values) & ~np.isnan(from_bits(values))
    ).any((1, 3)).nonzero()  # fmt: skip
    assert set(blocks * BLOCK + pairs * pack + halves) <= set(slots)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("width", [1, 16, 33, 576, 2048])
def test_add_norm_equals_its_slow_twin(dtype, width):
    random, rounds = np.random.default_rng(width), dtype == "bfloat16"
    x, y, weight = (
        stored(random.standard_normal(shape) * 3, dtype)
        for shape in ((5, width), (5, width), width)
    )
    before, out = from_bits(x), np.empty_like(x)
    pointwise.add_norm(x, y, weight, out, np.float32(1e-5))
    exact_sum = before + from_bits(y)
    assert np.array_equal(x, bf16_bits(exact_sum)) if rounds else np.allclose(
        x, exact_sum, rtol=1e-7, atol=0
    )  # fmt: skip
    for row in range(5):
        expected = norm_row(from_bits(x[row]), from_bits(weight), 1e-5, rounds)
        # Where the first rounding is a near tie, float32 may take the other side: one step more.
        wide = 3 * BF16_HALF_STEP + 1e-6 if rounds else 1e-6
        error = np.abs(from_bits(out[row]) - expected)
        assert (error <= wide * np.abs(expected)).all()
        if rounds:
            assert (error <= BF16_HALF_STEP * 1.001 * np.abs(expected)).mean() >= 0.98


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kernel", ["silu_multiply", "silu_multiply_parallel"])
def test_silu_multiply_equals_its_slow_twin(dtype, kernel):
    random, rounds = np.random.default_rng(0), dtype == "bfloat16"
    special = [0, -0.0, 80, -80, 1e4, -1e4, 1e-30, -1e-30]
    gate = np.concatenate([random.standard_normal(3000) * 4, special])
    up = random.standard_normal(gate.shape)
    gate_up = stored(np.stack([np.concatenate([gate, up])] * 6), dtype)
    out = np.empty((6, len(gate)), gate_up.dtype)
    getattr(pointwise, kernel)(gate_up, out)
    exact_gate, exact_up = np.split(from_bits(gate_up[0]), 2)
    expected = silu_multiply_row(exact_gate, exact_up, rounds)
    wide = 3 * BF16_HALF_STEP + 1e-6 if rounds else 2e-6
    for row in out:
        assert np.array_equal(row, out[0])
        error = np.abs(from_bits(row) - expected)
        assert (error <= wide * np.abs(expected) + 1e-30).all()
        if rounds:
            assert (error <= BF16_HALF_STEP * 1.001 * np.abs(expected) + 1e-30).mean() >= 0.99


def test_both_activations_give_the_same_bits():
    # Every bfloat16 number as the gate, at several places of a row.
    gates = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    gates = gates[(gates & 0x7F80) != 0x7F80]  # but infinity and NaN
    gates = np.concatenate([gates, gates[:16], gates])
    one = bf16_bits(np.ones(len(gates)))
    gate_up = np.stack([np.concatenate([gates, one])] * 5)
    serial, threads = (np.empty((5, len(gates)), np.uint16) for _ in range(2))
    pointwise.silu_multiply(gate_up, serial)
    pointwise.silu_multiply_parallel(gate_up, threads)
    assert np.array_equal(serial, threads), ROWS_DIFFER


@pytest.mark.parametrize("width", [16, 96, 1536])
def test_both_activations_give_the_same_bits_in_float32(width):
    random = np.random.default_rng(width)
    gate_up = (random.standard_normal((200, 2 * width)) * 3).astype(np.float32)
    serial, threads = (np.empty((200, width), np.float32) for _ in range(2))
    pointwise.silu_multiply(gate_up, serial)
    pointwise.silu_multiply_parallel(gate_up, threads)
    assert np.array_equal(serial, threads), ROWS_DIFFER


@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("size", "share", "groups"), [(32, 1, 1), (64, 3, 3), (128, 2, 8)])
def test_both_rotations_give_the_same_bits(dtype, size, share, groups, head_norms):
    results = []
    for rotate in (attention.rotate, attention.rotate_parallel):
        world = World(dtype, size, groups, [700], seed=3)
        angles = np.outer(np.arange(700), 1.0 / 10000.0 ** (np.arange(0, size, 2) / size))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        positions = np.arange(700)
        slots = np.array([world.tables[0][p // BLOCK] * BLOCK + p % BLOCK for p in positions])
        qkv = world.draw((700, (share * groups + 2 * groups) * size), 2.0)
        weights = [world.draw((size if head_norms else 0,)) for _ in range(2)]
        queries = np.zeros((groups, 700 * share + TILE_ROWS, size), np.float32)
        rotate(
            qkv, cos, sin, weights[0], weights[1], np.float32(1e-6), positions, slots,
            world.keys, world.values, queries,
        )  # fmt: skip
        used = world.tables[0]
        results.append((queries, world.keys[used], world.values[used]))
    for serial, threads in zip(*results, strict=True):
        assert np.array_equal(serial, threads), ROWS_DIFFER


def test_exp_negative_is_exact_to_float32():
    x = -np.concatenate([np.linspace(0, 80, 4001), [0.0]]).astype(np.float32)
    found = np.array([pointwise.exp_negative(each) for each in x], np.float64)
    # The product with log2(e) is rounded to float32: an error that grows with x.
    bound = 3e-7 + np.abs(x) * 2.0**-23
    assert (np.abs(found / np.exp(x.astype(np.float64)) - 1) < bound).all()


@pytest.mark.parametrize("max_tokens", [1, 3, 64])
@pytest.mark.parametrize("share", [1, 3])
def test_units_cover_every_token_and_segment_once(max_tokens, share):
    groups = 2
    spans = [Span(1, 1), Span(300, 300), Span(256, 4), Span(257, 4), Span(1000, 1), Span(513, 70)]
    positions = np.concatenate([np.arange(s.context - s.count, s.context) for s in spans])
    starts = np.cumsum([0, *[s.count for s in spans]])
    units, token_units, num_rows = attention.plan_units(
        starts, positions, positions + 1, share, groups, max_tokens
    )
    next_row = 0
    for request, first, end, _, row in units:
        assert starts[request] <= first < end <= min(first + max_tokens, starts[request + 1])
        assert row == next_row
        next_row += groups * (-(-(end - first) * share // TILE_ROWS) * TILE_ROWS)
    assert next_row == num_rows
    for token, (low, high) in enumerate(token_units):
        assert (units[low:high, 1] <= token).all()
        assert (token < units[low:high, 2]).all()
        segments = list(units[low:high, 3])
        assert segments == list(range(len(segments)))
        assert len(segments) > positions[token] // attention.SEGMENT
