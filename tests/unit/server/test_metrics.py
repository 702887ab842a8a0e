"""Metrics: their names on the wire, and that their numbers add up.

After a wanted change of names, write the golden list anew and read its diff:

    FORERUN_WRITE_GOLDEN=1 .venv/bin/python -m pytest tests/unit/server/test_metrics.py -k golden
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

from forerun.engine.stats import RequestStats, SampledRow, StepReport
from forerun.params import SamplingParams
from forerun.server.metric_counts import MAX_LABELS, buckets_1_2_5, count_buckets
from forerun.server.metrics import Metrics
from forerun.types import FinishReason

HERE = Path(__file__).parent
GOLDEN = HERE / "metrics_golden.txt"
GRAFANA = HERE.parents[2] / "examples" / "grafana"
LABELS = {"model_name", "method", "position", "reason", "finished_reason", "draft_length"}
MAX_DRAFT = 5

STATS = RequestStats(
    num_prompt_tokens=40, num_steps=5, num_drafts=4, num_drafted=12, num_accepted=6,
    num_emitted=11, offered_by_position=(4, 4, 4), accepted_by_position=(3, 2, 1),
    num_cached_tokens=32, num_preemptions=1, drafter_faults={}, queue_s=0.004, ttft_s=0.03,
    e2e_s=0.08, draft_s=0.01, verify_s=0.05, host_s=0.01,
)  # fmt: skip


def report(*rows: SampledRow, **changes: object) -> StepReport:
    made = StepReport(
        num_requests=len(rows), num_rows=sum(1 + row.num_drafted for row in rows),
        num_prompt_tokens=0, sampled=rows, draft_s=0.001, verify_s=0.01, host_s=0.002,
        plain_s=0.02, num_running=len(rows), num_waiting=0, num_blocks_used=3, num_blocks=12,
        num_preempted=0, faults=(),
    )  # fmt: skip
    return replace(made, **changes)


def make(**options: object) -> Metrics:
    given = {"model_name": "m", "max_draft": MAX_DRAFT, "max_model_len": 512, "method": "ngram"}
    return Metrics(**(given | options))


def exercised() -> Metrics:
    """Metrics in which every label has a value."""
    metrics = make()
    metrics.on_step(
        report(
            SampledRow("ngram", 3, 2, 3, None),
            SampledRow("ngram", 0, 0, 1, "no_guess"),
            faults=("raised",),
        )
    )
    metrics.on_request_started(40, SamplingParams(n=2))
    metrics.on_request_finished(STATS, FinishReason.STOP, SamplingParams())
    metrics.on_rejected("queue_full")
    metrics.on_drift("acceptance")
    metrics.set_costs(0.02, 1.4)
    return metrics


class Scrape:
    """What a scrape says: values by sample name and labels (model_name left out)."""

    def __init__(self, metrics: Metrics) -> None:
        self.families = list(parse(metrics.render().decode()))
        self.values: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for family in self.families:
            for sample in family.samples:
                labels = tuple(v for k, v in sorted(sample.labels.items()) if k != "model_name")
                self.values[sample.name][labels] = sample.value

    def __call__(self, name: str) -> float:
        return sum(self.values[name].values())

    def by_label(self, name: str) -> dict[str, float]:
        return {label: value for (label,), value in self.values[name].items()}


def names_on_the_wire(metrics: Metrics) -> list[str]:
    lines = []
    for family in parse(metrics.render().decode()):
        if not family.name.startswith(("forerun_", "vllm:")):
            continue
        labels = {key for sample in family.samples for key in sample.labels} - {"le"}
        suffix = "_total" if family.type == "counter" else ""
        lines.append(f"{family.name}{suffix} {family.type} {','.join(sorted(labels))}")
    return sorted(lines)


def golden_names() -> set[str]:
    """List every name that an expression may use."""
    names = set()
    for line in GOLDEN.read_text().splitlines():
        name, kind, _ = line.split(" ")
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names.update(name + suffix for suffix in suffixes)
    return names


def test_the_golden_list_of_names_types_and_labels():
    lines = names_on_the_wire(exercised())
    if os.environ.get("FORERUN_WRITE_GOLDEN"):
        GOLDEN.write_text("\n".join(lines) + "\n")
    assert lines == GOLDEN.read_text().splitlines()
    assert {label for line in lines for label in line.split(" ")[2].split(",")} == LABELS


def test_counters_say_total_once():
    text = exercised().render().decode()
    assert "_total_total" not in text
    assert "_created" not in text
    assert "process_cpu_seconds_total" in text
    assert "python_info" in text


def test_everything_is_there_at_the_first_scrape():
    scrape = Scrape(make())
    positions = [str(each) for each in range(MAX_DRAFT)]
    for name in (
        "forerun_spec_num_offered_per_pos_total",
        "forerun_spec_num_accepted_per_pos_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ):
        assert scrape.by_label(name) == dict.fromkeys(positions, 0)
    assert scrape.by_label("forerun_spec_num_drafted_total") == {"none": 0, "ngram": 0}
    reasons = {"stop": 0, "length": 0, "cancelled": 0, "error": 0}
    assert scrape.by_label("forerun_requests_finished_total") == reasons
    assert scrape("forerun_spec_enabled") == 1
    assert scrape("forerun_spec_max_draft") == MAX_DRAFT
    assert "forerun_spec_verify_growth" not in scrape.values  # not measured


def test_the_vllm_names_can_be_left_out():
    assert b"vllm:" not in make(compat_vllm=False).render()


@st.composite
def sampled_rows(draw: st.DrawFn) -> SampledRow:
    num_drafted = draw(st.integers(0, MAX_DRAFT))
    num_accepted = draw(st.integers(0, num_drafted))
    own = draw(st.integers(0, 1))  # 0: a stop cut the block before the target's own token
    return SampledRow(
        draw(st.sampled_from(["none", "ngram", "draft_model"])),
        num_drafted,
        num_accepted,
        num_accepted + own,
        None if num_drafted else draw(st.sampled_from(["no_guess", "no_room"])),
    )


SECONDS = st.floats(0, 1)
REPORTS = st.lists(
    st.builds(
        StepReport,
        num_requests=st.integers(0, 9), num_rows=st.integers(1, 600),
        num_prompt_tokens=st.integers(0, 500),
        sampled=st.lists(sampled_rows(), max_size=6).map(tuple),
        draft_s=SECONDS, verify_s=SECONDS, host_s=SECONDS, plain_s=SECONDS,
        num_running=st.integers(0, 9), num_waiting=st.integers(0, 9),
        num_blocks_used=st.integers(0, 9), num_blocks=st.just(9), num_preempted=st.integers(0, 2),
        faults=st.lists(st.sampled_from(["raised", "late"]), max_size=2).map(tuple),
    ),
    max_size=8,
)  # fmt: skip

ALIASES = {
    "vllm:spec_decode_num_drafts_total": "forerun_spec_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total": "forerun_spec_num_drafted_total",
    "vllm:spec_decode_num_accepted_tokens_total": "forerun_spec_num_accepted_total",
    "vllm:generation_tokens_total": "forerun_spec_num_emitted_total",
    "vllm:num_preemptions_total": "forerun_preemptions_total",
    "vllm:num_requests_running": "forerun_requests_running",
    "vllm:num_requests_waiting": "forerun_requests_waiting",
    "vllm:iteration_tokens_total_sum": "forerun_step_tokens_sum",
}


@settings(max_examples=50, deadline=None)
@given(reports=REPORTS)
def test_counters_add_up(reports):
    metrics = make()
    for each in reports:
        metrics.on_step(each)
    scrape = Scrape(metrics)
    rows = [row for each in reports for row in each.sampled]
    emitted = scrape("forerun_spec_num_emitted_total")
    accepted = scrape("forerun_spec_num_accepted_total")
    drafted = scrape("forerun_spec_num_drafted_total")
    assert emitted == accepted + sum(row.num_emitted > row.num_accepted for row in rows)
    assert scrape("forerun_spec_num_steps_total") == len(rows)
    assert scrape("forerun_spec_idle_total") == len(rows) - scrape("forerun_spec_num_drafts_total")
    assert drafted == sum(row.num_drafted for row in rows)
    assert scrape("forerun_spec_num_offered_per_pos_total") == drafted
    assert scrape("forerun_spec_num_accepted_per_pos_total") == accepted
    assert scrape("forerun_spec_draft_length_sum") == drafted
    assert scrape("forerun_spec_accepted_tokens_sum") == accepted
    assert scrape("forerun_spec_accepted_tokens_count") == scrape("forerun_spec_num_drafts_total")
    offered = scrape.by_label("forerun_spec_num_offered_per_pos_total")
    kept = scrape.by_label("forerun_spec_num_accepted_per_pos_total")
    assert all(kept[position] <= offered[position] for position in offered)
    for alias, own in ALIASES.items():
        assert scrape(alias) == scrape(own), alias
    assert kept == scrape.by_label("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert scrape("forerun_batch_size_count") == len(reports)
    assert scrape("forerun_batch_size_sum") == sum(each.num_requests for each in reports)
    assert scrape("forerun_step_rows_sum") == sum(each.num_rows for each in reports)
    assert scrape("forerun_spec_fallback_total") == sum(len(each.faults) for each in reports)
    near = {"rel_tol": 1e-9, "abs_tol": 1e-9}
    for name, field in (("draft", "draft_s"), ("verify", "verify_s"), ("overhead", "host_s")):
        total = sum(getattr(each, field) for each in reports)
        assert math.isclose(scrape(f"forerun_spec_{name}_seconds_total"), total, **near)
    balance = scrape("forerun_spec_saved_seconds_total") - scrape("forerun_spec_lost_seconds_total")
    assert math.isclose(balance, sum(each.saved_s for each in reports), **near)


def test_nobody_is_charged_for_drafts_of_others():
    metrics = make()
    guessed, plain = SampledRow("ngram", 2, 1, 2, None), SampledRow("none", 0, 0, 1, "not_wanted")
    metrics.on_step(report(guessed, plain, plain, plain))
    scrape = Scrape(metrics)
    assert scrape.by_label("forerun_spec_draft_seconds_total") == {"none": 0, "ngram": 0.001}
    assert scrape.by_label("forerun_spec_verify_seconds_total") == {"none": 0.0075, "ngram": 0.0025}


def test_a_step_of_prompts_alone_counts_under_no_method():
    metrics = make()
    metrics.on_step(report(num_requests=1, num_rows=64, num_prompt_tokens=64))
    scrape = Scrape(metrics)
    assert scrape.by_label("forerun_spec_verify_seconds_total") == {"none": 0.01, "ngram": 0}
    assert scrape("forerun_prompt_tokens_computed_total") == 64
    assert scrape("forerun_step_tokens_sum") == 64


def test_what_requests_add():
    scrape = Scrape(exercised())
    assert scrape("forerun_prompt_tokens_total") == scrape("vllm:prompt_tokens_total") == 40
    assert scrape("vllm:prefix_cache_queries_total") == 40
    assert scrape("vllm:prefix_cache_hits_total") == 32
    assert scrape("vllm:kv_cache_usage_perc") == 0.25
    assert scrape("forerun_request_params_n_sum") == 2
    for own, vllm, value in (
        ("ttft", "time_to_first_token", 0.03),
        ("tpot", "request_time_per_output_token", 0.005),
        ("e2e", "e2e_request_latency", 0.08),
        ("queue", "request_queue_time", 0.004),
    ):
        for name in (f"forerun_{own}_seconds", f"vllm:{vllm}_seconds"):
            assert scrape(f"{name}_sum") == pytest.approx(value)
            assert scrape(f"{name}_count") == 1


def test_no_latency_is_made_up():
    metrics = make()
    nothing = replace(STATS, num_emitted=0, num_steps=0)
    metrics.on_request_finished(nothing, FinishReason.CANCELLED, SamplingParams())
    metrics.on_request_finished(STATS, FinishReason.CANCELLED, SamplingParams())
    one = replace(STATS, num_emitted=1)
    metrics.on_request_finished(one, FinishReason.LENGTH, SamplingParams(max_tokens=None))
    scrape = Scrape(metrics)
    counts = {name: scrape(f"forerun_{name}_seconds_count") for name in ("ttft", "tpot", "e2e")}
    assert counts == {"ttft": 2, "tpot": 1, "e2e": 1}
    assert scrape("forerun_queue_seconds_count") == 2
    assert scrape("forerun_request_params_max_tokens_sum") == 2 * 256 + (512 - 40)
    aborted = scrape.by_label("vllm:request_success_total")
    assert aborted == {"stop": 0, "length": 1, "abort": 2, "error": 0}


def test_reasons_are_bounded():
    metrics = make()
    for index in range(100):
        metrics.on_rejected(f"reason {index}")
        metrics.on_step(report(SampledRow(f"method {index}", 0, 0, 1, f"why {index}")))
    scrape = Scrape(metrics)
    for name in (
        "forerun_admission_rejections_total",
        "forerun_spec_idle_total",
        "forerun_spec_num_drafted_total",
        "forerun_spec_verify_seconds_total",
    ):
        assert len(scrape.by_label(name)) == MAX_LABELS + 1, name
    assert scrape.by_label("forerun_admission_rejections_total")["other"] == 100 - MAX_LABELS
    assert scrape("forerun_admission_rejections_total") == 100


def test_turning_off_is_a_fallback_once():
    metrics = make()
    metrics.set_enabled(False, "costs more than it gives")
    metrics.set_enabled(False, "costs more than it gives")
    metrics.set_max_draft(2)
    scrape = Scrape(metrics)
    assert scrape("forerun_spec_enabled") == 0
    assert scrape("forerun_spec_fallback_total") == 1
    assert scrape("forerun_spec_max_draft") == 2
    assert len(scrape.by_label("forerun_spec_num_offered_per_pos_total")) == MAX_DRAFT


def test_gauges_can_be_corrected_between_steps():
    metrics = exercised()
    metrics.set_load(0, 0, 0)
    scrape = Scrape(metrics)
    assert scrape("forerun_requests_running") == scrape("vllm:kv_cache_usage_perc") == 0


def test_two_engines_in_one_process():
    one, other = make(model_name="one"), make(model_name='o"the\\r\n')
    one.on_step(report(SampledRow("ngram", 3, 2, 3, None)))
    assert Scrape(one)("forerun_spec_num_accepted_total") == 2
    assert Scrape(other)("forerun_spec_num_accepted_total") == 0
    labels = {
        sample.labels.get("model_name")
        for family in Scrape(other).families
        if family.name.startswith("forerun_")
        for sample in family.samples
    }
    assert labels == {'o"the\\r\n'}


def test_the_format_that_is_asked_for():
    metrics = exercised()
    text, content_type = metrics.render_for("application/openmetrics-text;version=1.0.0;q=0.5")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith(b"# EOF\n")
    assert any(family.name == "forerun_spec_num_drafts" for family in parse_open(text.decode()))
    for accept in ("", "*/*", "text/html", "application/openmetrics-text;version=x", ";,=;;"):
        text, content_type = metrics.render_for(accept)
        assert content_type == metrics.content_type == "text/plain; version=0.0.4; charset=utf-8"
        assert b"# EOF" not in text


def test_a_scrape_amid_steps_is_of_one_moment():
    metrics, over = make(), threading.Event()

    def step() -> None:
        while not over.is_set():
            metrics.on_step(report(SampledRow("ngram", 3, 3, 4, None)))

    thread = threading.Thread(target=step)
    thread.start()
    try:
        for _ in range(20):
            scrape = Scrape(metrics)
            steps = scrape("forerun_spec_num_steps_total")
            assert scrape("forerun_spec_num_accepted_total") == 3 * steps
            assert scrape("vllm:generation_tokens_total") == 4 * steps
            assert scrape("forerun_batch_size_count") == steps
    finally:
        over.set()
        thread.join()


def test_buckets():
    bounds = {labels[0] for labels in Scrape(make()).values["forerun_tpot_seconds_bucket"]}
    assert {"0.0005", "0.001", "0.002", "0.003", "0.005", "0.0075"} <= bounds
    assert buckets_1_2_5(30) == (1, 2, 5, 10, 20)
    assert count_buckets(0) == (0,)
    assert count_buckets(7) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert count_buckets(64)[-1] == 64


def test_the_dashboard_uses_metrics_that_exist():
    # as text, so that variables and annotations are seen too
    text = (GRAFANA / "forerun.json").read_text()
    used = set(re.findall(r"(?:forerun_|vllm:)[a-z0-9_]+", text))
    assert used <= golden_names(), used - golden_names()
    assert len(used) > 20


def test_the_dashboard_can_be_imported():
    board = json.loads((GRAFANA / "forerun.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    assert board["uid"]
    for panel in board["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
            assert panel["description"], panel["title"]
        # a panel's own window would leave the common time axis
        assert not panel.get("timeFrom")
        assert not panel.get("timeShift")
