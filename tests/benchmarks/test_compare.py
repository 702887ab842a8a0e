"""benchmarks/compare.py: turns, statistics, tables, and workers that answer, refuse or die."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from reference.tiny import Tiny

from forerun.model.loader import open_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from peers.contestants import DEFAULTS, Contestant, choose, parse
from peers.gguf_file import write_gguf
from peers.process import Worker, WorkerFailed
from peers.summary import Block, PromptIds, Run, Spread, load_rows, rows
from peers.table import group_table, load_table, main_table
from peers.turns import answer_in_turn, idle_shares, load_in_turn, rotated, without_end

PLAIN, SPEC, OTHER = "forerun:plain", "forerun:ngram", "vllm:plain"
PLAIN_OF = {PLAIN: PLAIN, SPEC: PLAIN, OTHER: OTHER}
PROMPTS = [PromptIds(i, "even" if i % 2 == 0 else "odd", (5, 6, i + 7)) for i in range(3)]


def start(tmp_path: Path, **options: bool) -> Worker:
    command = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]
    return Worker([*command, json.dumps(options)], os.environ, tmp_path / "log", 60)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = start(tmp_path)
    yield made
    made.close()


def run(name: str, prompt: int, tokens_per_s: float, *, token: int = 1, number: int = 1) -> Run:
    """Make a run of 11 tokens at a decode rate, the first after a second."""
    return Run(
        contestant=name, prompt=prompt, group=PROMPTS[prompt].group, round_number=number,
        num_tokens=11, num_first=1, token_ids=(token,) * 11, ttft_s=1.0,
        total_s=1.0 + 10 / tokens_per_s, drafted=8, accepted=2, steps=9,
    )  # fmt: skip


def test_everybody_begins_equally_often():
    orders = [rotated("abc", turn) for turn in range(6)]
    assert ["".join(order) for order in orders] == ["abc", "bca", "cab"] * 2
    assert rotated([], 3) == []


def test_contestants_are_read_as_they_are_written():
    for text in ("forerun:plain", "llama.cpp:ngram-simple:8@bfloat16", "openvino:lookup@float32"):
        assert str(parse(text)) == text
    with pytest.raises(ValueError, match="no mode 'lookup'; it has plain, ngram"):
        parse("vllm:lookup")
    with pytest.raises(ValueError, match="not one of forerun"):
        parse("ollama:plain")


def test_contestants_are_chosen_by_peer_and_pattern():
    assert choose([], [], [], [], load=False) == list(DEFAULTS)
    assert {each.peer for each in choose([], [], ["vllm"], [], load=True)} == {
        "forerun", "llama.cpp", "openvino",
    }  # fmt: skip
    chosen = choose(["float32", "bfloat16"], ["*:plain*"], ["vllm"], [], load=False)
    assert len(chosen) == 2 * 4
    assert all(each.mode == "plain" for each in chosen)
    extra = "openvino:lookup:9"
    assert str(choose([], ["openvino"], [], [extra], load=False)[-1]) == extra


def test_auto_is_the_format_that_suits_the_processor():
    assert parse("forerun:plain").computed_dtype(has_fast_bf16=False) == "float32"
    assert parse("forerun:plain").computed_dtype(has_fast_bf16=True) == "bfloat16"
    assert parse("llama.cpp:plain").computed_dtype(has_fast_bf16=False) == "bfloat16"
    assert parse("forerun:plain@bfloat16").computed_dtype(has_fast_bf16=False) == "bfloat16"
    assert parse("vllm:ngram:3@float32").plain == Contestant("vllm", "plain", None, "float32")


def test_spread_of_known_numbers():
    assert Spread.of([]) is None
    assert Spread.of([4.0]) == Spread(4, 4, 4, 4, 4, 1)
    assert Spread.of([5, 1, 2, 4, 3]) == Spread(3, 2, 4, 1, 5, 5)


def test_ratios_are_made_prompt_by_prompt():
    runs = [run(PLAIN, 0, 10), run(PLAIN, 1, 20), run(SPEC, 0, 30), run(SPEC, 1, 20)]
    _, spec = rows(runs, PLAIN_OF, PLAIN)
    assert spec.ratio is not None
    assert (spec.ratio.least, spec.ratio.median, spec.ratio.most) == pytest.approx((1, 2, 3))
    assert spec.total_tokens_per_s == pytest.approx(20 / (10 / 30 + 10 / 20))
    assert spec.end_to_end_tokens_per_s == pytest.approx(22 / (2 + 10 / 30 + 10 / 20))
    assert spec.tokens_per_step == pytest.approx(11 / 9)
    assert spec.draft_acceptance_rate == pytest.approx(2 / 8)


def test_a_slow_round_does_not_count_for_one_contestant_only():
    """Medians of rounds: one disturbed run of three changes no ratio."""
    rates = {PLAIN: (10, 10, 10), SPEC: (20, 1, 20)}
    runs = [
        run(name, 0, rate, number=i + 1)
        for name, all_rates in rates.items()
        for i, rate in enumerate(all_rates)
    ]
    _, spec = rows(runs, PLAIN_OF, PLAIN)
    assert spec.ratio is not None
    assert spec.ratio.median == pytest.approx(2)


def test_equal_answers_are_counted_against_the_tool_s_own_plain_ones():
    runs = [run(PLAIN, 0, 10), run(PLAIN, 1, 10), run(SPEC, 0, 10), run(SPEC, 1, 10, token=3)]
    runs += [run(OTHER, 0, 10, token=4), run(OTHER, 0, 10, token=5, number=2)]
    plain, spec, other = rows(runs, PLAIN_OF, PLAIN)
    assert (plain.same_as_plain, plain.same_as_reference) == (None, None)
    assert (spec.same_as_plain, spec.num_prompts, spec.repeats_itself) == (1, 2, 2)
    assert (other.same_as_plain, other.same_as_reference, other.repeats_itself) == (None, 0, 0)


def test_groups_are_summed_up_alone():
    runs = [run(PLAIN, 0, 10), run(PLAIN, 1, 20), run(PLAIN, 2, 30)]
    (even,) = rows(runs, PLAIN_OF, PLAIN, "even")
    assert even.tokens_per_s is not None
    assert (even.num_prompts, even.tokens_per_s.median) == (2, pytest.approx(20))


def test_an_answer_in_one_piece_has_no_decode_rate():
    whole = run(PLAIN, 0, 10)
    whole = Run(**{name: getattr(whole, name) for name in whole.__slots__} | {"total_s": 1.0})
    assert whole.tokens_per_s is None
    (row,) = rows([whole], PLAIN_OF, PLAIN)
    assert (row.tokens_per_s, row.ratio) == (None, None)
    assert "-" in main_table([row], {PLAIN: {}})


def test_tables_name_everybody_and_align():
    runs = [run(name, i, 10 * (i + 1)) for name in PLAIN_OF for i in range(3)]
    hellos = {name: {"versions": {"x": "1.2"}, "dtype": "float32"} for name in PLAIN_OF}
    groups = [row for group in ("even", "odd") for row in rows(runs, PLAIN_OF, PLAIN, group)]
    for text in (
        main_table(rows(runs, PLAIN_OF, PLAIN), hellos),
        group_table(groups, ["even", "odd"]),
    ):
        lines = text.splitlines()
        assert [line.split()[0] for line in lines[1:]] == list(PLAIN_OF)
        assert len({len(line) for line in lines}) == 1


def test_load_is_compared_within_rounds():
    def block(name: str, number: int, seconds: float) -> Block:
        return Block(name, 4, number, 8, 100, seconds, 50, seconds / 2, (0.1,) * 8)

    blocks = [block(PLAIN, 1, 1), block(PLAIN, 2, 2), block(OTHER, 1, 2), block(OTHER, 2, 4)]
    plain, other = load_rows(blocks, [PLAIN, OTHER], PLAIN)
    assert (plain.tokens_per_s.median, other.tokens_per_s.median) == (75, 37.5)
    assert other.ratio == Spread(0.5, 0.5, 0.5, 0.5, 0.5, 2)
    assert "4 at once" in load_table([plain, other])


def test_a_final_end_of_text_is_dropped():
    assert without_end([1, 2], [2]) == (1,)
    assert without_end([2, 1], [2]) == (2, 1)
    assert without_end([], [2]) == ()


def test_a_worker_answers_and_prints_elsewhere(worker: Worker, tmp_path: Path):
    assert worker.hello["versions"] == {"fake": "1"}
    reply = worker.ask({"prompt_ids": [5, 6, 7], "max_tokens": 9}, 60)
    assert reply["token_ids"] == [7, 6, 5, 2]
    assert (reply["num_first"], reply["steps"], reply["drafted"]) == (1, 4, 0)
    assert 0 <= reply["ttft_s"] <= reply["total_s"]
    assert "a tool that prints" in (tmp_path / "log").read_text()
    assert worker.peak_rss_bytes() > 1 << 20


def test_a_worker_says_why_it_does_not_start(tmp_path: Path):
    with pytest.raises(WorkerFailed, match="RuntimeError: no such instructions here"):
        start(tmp_path, refuses=True)


def test_a_worker_that_dies_leaves_its_last_words(tmp_path: Path):
    worker = start(tmp_path, dies=True)
    with pytest.raises(WorkerFailed, match="ended with signal SIGABRT: last words"):
        worker.ask({"prompt_ids": [1], "max_tokens": 1}, 60)
    worker.close()


def test_an_idle_worker_takes_no_processor(worker: Worker):
    assert idle_shares({"fake": worker}, 0.3)["fake"] <= 0.1


def test_whoever_fails_is_out_and_the_rest_goes_on(worker: Worker, tmp_path: Path):
    (tmp_path / "b").mkdir()
    workers = {PLAIN: worker, OTHER: start(tmp_path / "b", dies=True)}
    failures: dict[str, str] = {}
    found = list(answer_in_turn(workers, PROMPTS, 2, 9, [2], 0, lambda _: None, failures))
    assert [each.contestant for each in found] == [PLAIN] * 6
    assert found[0].token_ids == (7, 6, 5)
    assert "SIGABRT" in failures[OTHER]
    assert list(workers) == [PLAIN]


def test_a_request_that_fails_is_told(worker: Worker):
    with pytest.raises(WorkerFailed, match="ValueError: cannot answer that"):
        worker.ask({"prompt_ids": [0], "max_tokens": 1}, 60)
    assert worker.ask({"prompt_ids": [4], "max_tokens": 9}, 60)["token_ids"] == [4, 2]


def test_load_gives_everybody_the_same_blocks(worker: Worker):
    workers = {PLAIN: worker}
    blocks = load_in_turn(workers, PROMPTS, [1, 2], 2, 3, 9, 0, lambda _: None, {})
    found = list(blocks)
    assert [(b.concurrency, b.round_number, b.num_requests) for b in found] == [
        (1, 1, 3), (2, 1, 6), (1, 2, 3), (2, 2, 6),
    ]  # fmt: skip
    assert [block.num_tokens for block in found] == [12, 24, 12, 24]
    assert all(len(block.ttfts_s) == block.num_requests for block in found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_converted_model_is_the_same_model(tiny: Tiny, tmp_path: Path, dtype: str):
    write_gguf(tiny.folder, tmp_path / "tiny.gguf", dtype)
    ours, theirs = open_model(tiny.folder), open_model(tmp_path / "tiny.gguf")
    assert theirs.config == ours.config
    assert theirs.weights.names == ours.weights.names
    for name in ours.weights.names:
        weight = ours.weights.read(name)
        kept = weight.bfloat16() if dtype == "bfloat16" and weight.dim() == 2 else weight
        assert torch.equal(theirs.weights.read(name).float(), kept.float()), name
