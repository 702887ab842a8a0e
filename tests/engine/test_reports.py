"""Observers hear what adds up, and what drafts are said to be worth follows its formula."""

from __future__ import annotations

import logging

import pytest
from reference.drafters import Fake, Oracle
from reference.tiny_engine import Bench

from forerun.engine.report import plain_seconds
from forerun.engine.stats import SampledRow
from forerun.params import SamplingParams


def row(num_drafted: int, num_accepted: int) -> SampledRow:
    return SampledRow("ngram", num_drafted, num_accepted, num_accepted + 1, None)


def test_a_plain_step_took_what_it_took() -> None:
    assert plain_seconds([row(0, 0)] * 3, 3, 0.05, 0.1) == 0.05
    assert plain_seconds([], 512, 0.9, 0.1) == 0.9


def test_the_example_of_the_docstring() -> None:
    assert plain_seconds([row(4, 4)], 5, 0.140, 0.1) == pytest.approx(0.5)


def test_rejected_drafts_are_a_loss_where_rows_cost() -> None:
    assert plain_seconds([row(4, 0)], 5, 0.140, 0.1) == pytest.approx(0.1)
    assert plain_seconds([row(4, 0)], 5, 0.140, 0.0) == pytest.approx(0.140)


def test_a_prompt_computed_beside_is_not_computed_again() -> None:
    """256 rows of somebody's prompt in the step: the three tokens gained cost a row each."""
    step_s = 1 + 0.1 * 259
    assert plain_seconds([row(3, 3)], 260, step_s, 0.1) == pytest.approx(1 + 0.1 * 256 + 3 * 1.0)


def test_reports_add_up_to_what_requests_counted(tiny, prompts) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    answers = tiny.answers(prompts, params)
    drafter = Oracle(answers, tiny.vocab_size)
    bench = Bench(tiny.folder, drafter, max_draft=4, cache_blocks=24, max_model_len=192)
    reports = []
    bench.core.observers.append(reports.append)
    generated = bench.generate(prompts, params)
    rows = [each for report in reports for each in report.sampled]
    stats = [each.stats for each in generated]
    assert len(rows) == sum(each.num_steps for each in stats)
    for name in ("num_drafted", "num_accepted", "num_emitted"):
        assert sum(getattr(each, name) for each in rows) == sum(getattr(s, name) for s in stats)
    assert all((each.idle_reason is None) == (each.num_drafted > 0) for each in rows)
    preempted = sum(report.num_preempted for report in reports)
    assert preempted == sum(each.num_preemptions for each in stats)
    assert preempted > 0, "the cache was big enough, and nothing was tested"
    assert sum(report.num_prompt_tokens for report in reports) >= sum(map(len, prompts))
    assert reports[-1].num_running == reports[-1].num_blocks_used == 0


def test_an_observer_that_raises_disturbs_nobody(tiny, prompts, caplog) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    plain = Bench(tiny.folder).generate(prompts, params)
    bench = Bench(tiny.folder)
    heard = []
    bench.core.observers += [lambda _: 1 / 0, heard.append]
    with caplog.at_level(logging.ERROR):
        generated = bench.generate(prompts, params)
    assert [each.token_ids for each in generated] == [each.token_ids for each in plain]
    assert len(heard) == bench.num_steps


class Failing(Fake):
    def propose(self, requests):
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("watched", [True, False])
def test_failures_of_drafts_are_told_once_and_kept_by_nobody(tiny, prompts, watched) -> None:
    bench = Bench(tiny.folder, Failing())
    reports = []
    if watched:
        bench.core.observers.append(reports.append)
    bench.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
    told = [fault for report in reports for fault in report.faults]
    assert told == (["propose_failed"] * len(prompts) if watched else [])
    assert bench.core._drafter.take_faults() == ()
