"""Padded and captured passes against the plain decoder: logits, caches, and what is captured."""

from __future__ import annotations

import functools
import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.drafters import RightThenWrong
from reference.tape import Tape, record
from reference.tiny_engine import Bench
from reference.tiny_models import make_decoder, random_prompt, save_tiny_model

from forerun.cache.kv_cache import KVCache
from forerun.engine import setup
from forerun.engine.runner import TargetRunner
from forerun.model import graphs
from forerun.model.graphs import GraphedDecoder, choose_shape
from forerun.model.loader import open_model
from forerun.model.paged import GroupShape, PassShape, Piece
from forerun.params import SamplingParams
from forerun.types import ForwardInput

BLOCK = 8
NUM_BLOCKS = 96
CPU = torch.device("cpu")
FAMILIES = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "mistral": ("mistral", {"sliding_window": 11}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request, tmp_path_factory):
    name, options = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_model(folder, name, num_hidden_layers=2, **options)
    files = open_model(folder)
    return make_decoder(files.config, files.weights, "torch")


def as_it_is(run):
    return run


class World:
    """The same requests in two caches: one behind a plain decoder, one behind a graphed one."""

    def __init__(self, decoder, capture, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        shape = decoder.cache_shape(BLOCK)
        self.decoder, self.plain_cache = decoder, KVCache(shape, NUM_BLOCKS, CPU)
        self.cache = KVCache(shape, NUM_BLOCKS + 1, CPU)
        for cache in (self.plain_cache, self.cache):  # what was never written may be anything
            cache.keys.fill_(torch.nan)
            cache.values.fill_(torch.nan)
        self.graphed = GraphedDecoder(decoder, self.cache, NUM_BLOCKS, capture)
        self.free = self.random.permutation(NUM_BLOCKS).tolist()
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def run(self, counts: dict[int, int], all_logits: bool = True) -> None:
        """Run tokens of requests, by number of rows; logits and caches must come out alike."""
        starts, positions, owners = [0], [], list(counts)
        for request, count in counts.items():
            first = self.lengths.get(request, 0)
            self.lengths[request] = first + count
            blocks = self.blocks.setdefault(request, [])
            while len(blocks) * BLOCK < first + count:
                blocks.append(self.free.pop())
            positions += range(first, first + count)
            starts.append(starts[-1] + count)
        width = max(len(self.blocks[request]) for request in owners)
        tables = [[*self.blocks[r], *[0] * (width - len(self.blocks[r]))] for r in owners]
        rows = list(range(starts[-1]))
        if not all_logits:  # the last rows of each, out of order
            rows = [end - 1 for end in starts[1:]][::-1]
        step = ForwardInput(
            token_ids=torch.tensor(random_prompt(starts[-1], seed=int(self.random.integers(1e9)))),
            positions=torch.tensor(positions),
            starts=torch.tensor(starts),
            block_tables=torch.tensor(tables),
            logit_rows=torch.tensor(rows),
            num_fine=starts[-1],
            num_sampling_rows=len(rows) if all_logits else 0,
        )
        found, _ = self.graphed.forward(step)
        expected = self.decoder.forward(step, self.plain_cache)
        assert expected.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
        for own, plain in zip(
            self.tensors(self.cache), self.tensors(self.plain_cache), strict=True
        ):
            torch.testing.assert_close(
                own[:, :NUM_BLOCKS], plain, rtol=1e-4, atol=2e-5, equal_nan=True
            )

    def tensors(self, cache: KVCache) -> list[torch.Tensor]:
        return [cache.keys, cache.values]

    def truncate(self, request: int, by: int) -> None:
        self.lengths[request] -= by


@pytest.mark.parametrize("capture", [as_it_is, record])
@pytest.mark.parametrize("seed", range(4))
def test_padded_passes_equal_plain_ones(decoder, capture, seed):
    world = World(decoder, capture, seed)
    world.run({0: 40, 1: 1, 2: 3})  # too many rows of one request: as it is
    assert not world.graphed.shapes
    for turn in range(14):
        chosen = [r for r in range(6) if world.random.random() < 0.7] or [0]
        most = int(world.random.choice([1, 3, 6]))
        counts = {r: int(world.random.integers(1, most + 1)) for r in chosen}
        world.run(counts, all_logits=turn % 3 != 2)
        for request, count in counts.items():  # drafts are refused
            world.truncate(request, int(world.random.integers(0, count)))
    assert len(world.graphed.shapes) > 2


@pytest.mark.parametrize("seed", range(3))
def test_a_captured_pass_serves_other_steps(decoder, seed):
    """Steps of one shape: captured once, and played over other tokens, tables and lengths."""
    captured = []

    def count(run):
        captured.append(run)
        return record(run)

    world = World(decoder, count, seed)
    for request in range(4):
        world.run({request: 17 + request})
    for counts in [
        {0: 3, 1: 1, 2: 3},
        {3: 2, 1: 3, 0: 1},
        {2: 4, 1: 1, 3: 1, 0: 2},
        {0: 3, 3: 3, 1: 1},
    ]:
        world.run(counts)
        for request in counts:
            world.truncate(request, 1)
    assert len(world.graphed.shapes) == len(captured) == 1


def test_rows_of_padding_touch_the_spare_block_alone(decoder):
    world = World(decoder, as_it_is, seed=0)
    for request in range(3):
        world.run({request: 1})
    shape = world.graphed.shapes[-1]
    assert shape.num_rows == 1  # no padding so far
    assert world.cache.values[:, NUM_BLOCKS].isnan().all()
    world.run({0: 1, 1: 1, 2: 1})
    assert world.graphed.shapes[-1].num_rows == 4
    assert not world.cache.values[:, NUM_BLOCKS].isnan().all()


def test_no_pass_makes_the_host_wait(decoder):
    """Prompts beside single tokens, which are not captured, and steps that are."""
    shape = decoder.cache_shape(BLOCK)
    cache = KVCache(shape, NUM_BLOCKS + 1, CPU)
    graphed = GraphedDecoder(decoder, cache, NUM_BLOCKS, as_it_is)
    for counts in [(300, 1, 1), (1, 3, 1)]:
        starts = np.cumsum([0, *counts])
        tables = np.arange(3)[:, None] * 30 + np.arange(30)
        step = ForwardInput(
            token_ids=torch.arange(starts[-1]) % 100,
            positions=torch.cat([torch.arange(count) for count in counts]),
            starts=torch.from_numpy(starts),
            block_tables=torch.from_numpy(np.concatenate([tables, tables + 8], 1)),
            logit_rows=torch.from_numpy(starts[1:] - 1),
            num_fine=int(starts[-1]),
            num_sampling_rows=3,
        )
        with Tape() as tape:
            graphed.forward(step)
        assert len(tape.records) > 100


def test_the_tape_refuses_what_makes_the_host_wait():
    x = torch.arange(4)
    for wait in (lambda: int(x[1]), lambda: x[x > 1], lambda: x.nonzero(), lambda: x.equal(x)):
        with pytest.raises(AssertionError, match="wait"), Tape():
            wait()


def test_groups_of_a_shape_may_be_several(decoder, monkeypatch):
    monkeypatch.setattr("forerun.model.paged.MAX_SCORES", 2 * 4 * (4 * BLOCK))  # two pieces
    world = World(decoder, record, seed=1)
    for counts in [{0: 2, 1: 1, 2: 4, 3: 1, 4: 1}, {0: 4, 1: 1, 2: 4, 3: 1, 4: 1, 5: 2, 6: 1}]:
        world.run(counts)
    (shape,) = world.graphed.shapes
    assert len(shape.groups) > 1


def test_a_capture_that_fails_is_said_and_done_without(decoder, caplog):
    def fail(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    world = World(decoder, fail, seed=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            world.run({0: 1, 1: 2})
    assert len(caplog.records) == 1
    assert "not permitted" in caplog.text


def test_old_shapes_make_room(decoder, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    world = World(decoder, record, seed=0)
    kept = []
    for counts in [{0: 1}, {0: 2}, {0: 1}, {0: 4}]:
        world.run(counts)
        kept.append([shape.num_rows for shape in world.graphed.shapes])
    assert kept == [[1], [1, 2], [2, 1], [1, 4]]


# --- shapes ------------------------------------------------------------------------------------


def test_a_shape_is_chosen():
    pieces = [Piece(i, 0, rows, 1000) for i, rows in enumerate([3, 2, 3, 3, 1])]
    assert choose_shape(pieces, 12, 32, 512) == PassShape(32, 32, (GroupShape(8, 4, 32),))


@pytest.mark.parametrize(
    "pieces",
    [
        [Piece(0, 0, 17, 100)],
        [Piece(0, 0, 1, 8000), *[Piece(i, 0, 1, 10) for i in range(31)]],
        [Piece(i, 0, 16, 20) for i in range(17)],
    ],
    ids=["many rows of one", "one long context", "many rows together"],
)
def test_other_steps_are_run_as_they_are(pieces):
    assert choose_shape(pieces, 1, 32, 512) is None


@given(
    sizes=st.lists(st.tuples(st.integers(1, 16), st.integers(0, 3000)), min_size=1, max_size=256),
    width=st.sampled_from([64, 1024]),
)
def test_a_shape_holds_the_step_and_wastes_little(sizes, width):
    pieces = [Piece(i, 0, rows, rows + past) for i, (rows, past) in enumerate(sizes)]
    num_rows = sum(rows for rows, _ in sizes)
    shape = choose_shape(pieces, num_rows, 32, width)
    if shape is None:
        return
    assert num_rows <= shape.num_rows <= max(graphs.CHEAP_ROWS, 2 * num_rows)
    assert sum(group.num_pieces for group in shape.groups) >= len(pieces)
    blocks = [-(-piece.length // 32) for piece in pieces]
    gathered = sum(group.num_pieces * group.num_blocks for group in shape.groups)
    assert gathered <= graphs.MAX_WASTE * sum(blocks) + graphs.FREE_BLOCKS
    for group in shape.groups:
        assert group.num_rows >= max(rows for rows, _ in sizes)
        assert group.num_blocks >= max(blocks)


# --- the engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_an_engine_of_captured_passes_says_the_same(
    tiny, prompts, monkeypatch, drafts, temperature
):
    monkeypatch.setattr(setup, "TargetRunner", functools.partial(TargetRunner, capture=record))
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=24)
    chosen = RightThenWrong(tiny.answers(prompts, params), tiny.vocab_size) if drafts else None
    bench = Bench(tiny.folder, chosen)
    bench.generate(prompts, params)
    for each, prompt in zip(bench.seen, prompts, strict=True):
        assert tuple(each.token_ids) == tiny.plain(prompt, params).token_ids
    assert len(bench.machinery.runner._passes._graphed.shapes) > 1
