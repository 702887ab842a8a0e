"""The dashboard's history: bins, percentiles, totals, judgement, and that memory stays bounded."""

from __future__ import annotations

import json
import math
import threading
import time
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.stats import RequestStats, SampledRow, StepReport
from forerun.server.history import NUM_BINS, NUM_EVENTS, History
from forerun.server.metric_bins import MAX_SAMPLES, Bin, percentile
from forerun.server.metric_counts import MAX_LABELS
from forerun.server.metrics import Metrics
from forerun.types import FinishReason

STATS = RequestStats(
    num_prompt_tokens=40, num_steps=5, num_drafts=4, num_drafted=12, num_accepted=6,
    num_emitted=11, offered_by_position=(4, 4, 4), accepted_by_position=(3, 2, 1),
    num_cached_tokens=32, num_preemptions=1, drafter_faults={}, queue_s=0.004, ttft_s=0.03,
    e2e_s=0.08, draft_s=0.01, verify_s=0.05, host_s=0.01,
)  # fmt: skip
GUESSED = SampledRow("ngram", 3, 2, 3, None)
IDLE = SampledRow("ngram", 0, 0, 1, "no_guess")
SERIES = {
    "time_s", "steps", "drafted", "accepted", "emitted", "acceptance_rate",
    "mean_acceptance_length", "tpot_p50_ms", "tpot_p95_ms", "tpot_p99_ms", "ttft_p50_ms",
    "ttft_p95_ms", "e2e_p50_ms", "queue_p50_ms", "draft_ms", "verify_ms", "host_ms", "speedup",
    "batch_size", "draft_length", "running", "waiting", "cache_usage", "wasted_tokens_per_s",
}  # fmt: skip


class Clock:
    def __init__(self, now_s: float = 1000.25) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def report(*rows: SampledRow, **changes: object) -> StepReport:
    made = StepReport(
        num_requests=len(rows), num_rows=sum(1 + row.num_drafted for row in rows),
        num_prompt_tokens=0, sampled=rows, draft_s=0.001, verify_s=0.01, host_s=0.002,
        plain_s=0.026, num_running=len(rows), num_waiting=1, num_blocks_used=3, num_blocks=12,
        num_preempted=0, faults=(),
    )  # fmt: skip
    return replace(made, **changes)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history(clock: Clock) -> History:
    return History("ngram", clock=clock)


def test_the_shape(history):
    for told in (history.snapshot(None), history.snapshot(5.0), history.snapshot(2000.0)):
        assert set(told) == {
            "now_s", "totals", "series", "by_position", "accepted_histogram", "idle_reasons",
            "events",
        }  # fmt: skip
        assert set(told["series"]) == SERIES
        assert set(told["totals"]) == {
            "steps", "drafts", "drafted", "accepted", "emitted", "requests", "prompt_tokens",
            "cached_tokens", "saved_s", "preemptions", "fallbacks",
        }  # fmt: skip
        assert set(told["by_position"]) == {"offered", "accepted"}
        assert len({len(column) for column in told["series"].values()}) == 1
        json.dumps(told, allow_nan=False)


def test_a_second(history, clock):
    history.on_step(report(GUESSED, IDLE, num_preempted=2, faults=("raised",)))
    history.on_step(report(GUESSED, num_prompt_tokens=8))
    history.on_finished(STATS, FinishReason.STOP)
    clock.now_s = 1002.5
    told = history.snapshot(None)
    series = told["series"]
    assert series["time_s"] == [1000, 1001, 1002]
    first = {name: column[0] for name, column in series.items()}
    assert first["steps"] == 3
    assert (first["drafted"], first["accepted"], first["emitted"]) == (6, 4, 7)
    assert first["acceptance_rate"] == pytest.approx(2 / 3, abs=1e-6)
    assert first["mean_acceptance_length"] == pytest.approx(7 / 3, abs=1e-6)
    assert (first["draft_ms"], first["verify_ms"], first["host_ms"]) == (1, 10, 2)
    assert first["speedup"] == 2
    assert first["batch_size"] == 1.5
    assert first["draft_length"] == 3
    assert first["wasted_tokens_per_s"] == 2
    assert (first["running"], first["waiting"], first["cache_usage"]) == (1, 1, 0.25)
    assert (first["tpot_p50_ms"], first["ttft_p95_ms"]) == (5, 30)
    assert (first["e2e_p50_ms"], first["queue_p50_ms"]) == (80, 4)
    counts = {"steps", "drafted", "accepted", "emitted", "wasted_tokens_per_s"}
    for name in SERIES - {"time_s"}:
        assert series[name][1] == (0 if name in counts else None)
    assert told["totals"] == {
        "steps": 3, "drafts": 2, "drafted": 6, "accepted": 4, "emitted": 7, "requests": 1,
        "prompt_tokens": 40, "cached_tokens": 32, "saved_s": 0.026, "preemptions": 2,
        "fallbacks": 1,
    }  # fmt: skip
    assert told["by_position"] == {"offered": [2, 2, 2], "accepted": [2, 2]}
    assert told["accepted_histogram"] == [0, 0, 2]
    assert told["idle_reasons"] == {"no_guess": 1}


def test_a_second_that_is_over_says_the_same(history, clock):
    for tpot in (0.001, 0.002, 0.009):
        history.on_finished(replace(STATS, e2e_s=0.03 + 10 * tpot), FinishReason.LENGTH)
    history.on_step(report(GUESSED))
    before = history.snapshot(None)["series"]
    clock.now_s += 1
    history.on_step(report(IDLE))
    after = history.snapshot(None)["series"]
    assert {name: column[0] for name, column in after.items()} == {
        name: column[0] for name, column in before.items()
    }
    assert after["tpot_p50_ms"] == [2, None]


def test_since(history, clock):
    history.event("start", "loaded")
    for _ in range(5):
        history.on_step(report(GUESSED))
        clock.now_s += 1
    seen = history.snapshot(None)["now_s"]
    history.event("drift", "acceptance fell")
    clock.now_s += 0.5
    history.event("drift", "acceptance rose")
    told = history.snapshot(seen)
    assert told["series"]["time_s"] == [1005]
    assert [each["text"] for each in told["events"]] == ["acceptance rose"]
    assert history.snapshot(1003.9)["series"]["time_s"] == [1003, 1004, 1005]
    assert history.snapshot(math.nan)["series"] == history.snapshot(None)["series"]
    assert history.snapshot(-1e300)["series"] == history.snapshot(None)["series"]
    assert told["totals"]["steps"] == 5


def test_no_value_is_made_up_or_unwritable(history):
    history.on_step(
        report(plain_s=math.nan, draft_s=0.0, verify_s=0.0, host_s=0.0, num_blocks=0, num_rows=0)
    )
    history.on_finished(replace(STATS, num_emitted=0), FinishReason.CANCELLED)
    told = history.snapshot(None)
    json.dumps(told, allow_nan=False)
    assert told["series"]["cache_usage"] == told["series"]["ttft_p50_ms"] == [None]


def test_a_clock_that_is_set_back(history, clock):
    history.on_step(report(GUESSED))
    clock.now_s -= 500
    history.on_step(report(GUESSED))
    assert history.snapshot(None)["series"]["steps"] == [2]
    clock.now_s += 501
    history.on_step(report(GUESSED))
    assert history.snapshot(None)["series"]["steps"] == [2, 1]


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50).map(sorted),
    percent=st.floats(0, 100),
)
def test_percentiles(values, percent):
    numpy = pytest.importorskip("numpy")
    assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)))


def test_memory_is_bounded(clock):
    history = History("ngram", clock=clock)

    def live(seconds: int) -> int:
        for second in range(seconds):
            clock.now_s += 1
            history.event("drift", f"at {clock.now_s}")
            history.on_step(report(GUESSED, SampledRow("ngram", 0, 0, 1, f"why {second}")))
            for _ in range(3):
                history.on_finished(STATS, FinishReason.STOP)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        full, later = live(NUM_BINS + 100), live(NUM_BINS + 100)
    finally:
        tracemalloc.stop()
    assert full < 4e6
    assert later < full + 100e3
    told = history.snapshot(None)
    assert len(told["series"]["time_s"]) == NUM_BINS
    assert told["series"]["time_s"][-1] == int(clock.now_s)
    assert len(told["events"]) == NUM_EVENTS
    assert len(told["idle_reasons"]) == MAX_LABELS + 1
    clock.now_s += 10 * NUM_BINS
    told = history.snapshot(None)
    assert len(told["series"]["time_s"]) == NUM_BINS
    assert not any(told["series"]["steps"])


def test_a_busy_second_is_bounded(clock):
    history = History("ngram", clock=clock)
    for _ in range(3 * MAX_SAMPLES):
        history.on_finished(STATS, FinishReason.STOP)
    now = history._bins[-1]
    assert now.num_samples == 4 * MAX_SAMPLES
    now.close()
    assert now.num_samples == 0
    assert Bin(0).values() == Bin(1).values()


def texts(history: History, level: str) -> list[str]:
    return [each["text"] for each in history.health() if each["level"] == level]


def test_health_is_ok_where_all_is_well(history):
    assert texts(history, "ok") == ["too few steps in the last minute to judge"]
    for _ in range(300):
        history.on_step(report(GUESSED))
    assert texts(history, "ok") == ["speculation works"]


def test_health_sees_speculation_silently_off(history, clock):
    for _ in range(300):
        history.on_step(report(IDLE))
    (text,) = texts(history, "bad")
    assert "silently off" in text
    assert "no_guess" in text
    history.set_enabled(False, "by hand")
    assert history.health() == [{"level": "ok", "text": "speculation is off"}]
    assert history.snapshot(None)["events"][-1]["text"] == "turned off: by hand"
    history.set_enabled(True, "by hand")
    assert texts(history, "bad")
    clock.now_s += 61
    assert not texts(history, "bad")


def test_health_blames_nobody_where_drafts_were_not_wanted(history):
    for _ in range(300):
        history.on_step(report(SampledRow("ngram", 0, 0, 1, "not_wanted")))
    assert not texts(history, "bad")
    plain = History("none")
    for _ in range(300):
        plain.on_step(report(SampledRow("none", 0, 0, 1, "not_wanted")))
    assert texts(plain, "ok") == ["speculation is off"]


def test_health_sees_drafts_that_stopped(history, clock):
    history.on_step(report(GUESSED))
    clock.now_s += 120
    for _ in range(300):
        history.on_step(report(IDLE))
    assert "silently off" in texts(history, "warn")[0]


def test_health_sees_acceptance_collapse(history):
    for index in range(300):
        history.on_step(report(SampledRow("ngram", 4, index % 50 == 0, 1, None)))
    assert "acceptance collapsed: 0.5% of 1200" in texts(history, "bad")[0]


@pytest.mark.parametrize(("plain_s", "level"), [(0.0065, "bad"), (0.0127, "warn"), (0.0131, "ok")])
def test_health_sees_speculation_that_costs_time(history, plain_s, level):
    for _ in range(300):
        history.on_step(report(GUESSED, plain_s=plain_s))
    (finding,) = history.health()
    assert finding["level"] == level
    assert ("costs time" in finding["text"]) == (level != "ok")


def test_many_threads(clock):
    history = History("ngram", clock=clock)

    def work() -> None:
        for _ in range(500):
            clock.now_s += 0.01
            history.on_step(report(GUESSED))
            history.on_finished(STATS, FinishReason.STOP)
            history.event("tick", "")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        json.dumps(history.snapshot(None), allow_nan=False)
        assert history.health()
    totals = history.snapshot(None)["totals"]
    assert (totals["steps"], totals["requests"], totals["accepted"]) == (2000, 2000, 4000)


def test_its_own_clock_shows_unix_time():
    assert abs(History().snapshot(None)["now_s"] - time.time()) < 5


@pytest.mark.parametrize("watcher", [History("ngram"), Metrics("m", 15, 512, method="ngram")])
def test_hearing_of_a_step_costs_microseconds(watcher):
    step = report(*[SampledRow("ngram", 4, index % 4, 1 + index % 4, None) for index in range(8)])
    rounds = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(50):
            watcher.on_step(step)
        rounds.append((time.perf_counter() - begin) / 50)
    assert min(rounds) < 150e-6  # 10 to 15 on a quiet machine
