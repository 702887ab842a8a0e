"""The counters against an independent recount by a drafter that keeps its own books."""

from __future__ import annotations

import pytest
from reference.drafters import Alternating, Bookkeeper, Oracle, Random, RightThenWrong
from reference.tiny_engine import Bench

from forerun.engine.stats import add_counts
from forerun.params import SamplingParams

PARAMS = [
    SamplingParams(temperature=0, max_tokens=25),
    SamplingParams(temperature=0.9, seed=3, max_tokens=30),
    SamplingParams(temperature=0, max_tokens=1),
    SamplingParams(temperature=1.1, seed=5, top_k=9, max_tokens=19),
]


def up_to(lengths):
    """How many of these lengths reach position 0, 1, ..."""
    return tuple(
        sum(length > position for length in lengths) for position in range(max(lengths, default=0))
    )


@pytest.mark.parametrize("kind", [Oracle, RightThenWrong, Alternating, Random])
@pytest.mark.parametrize("max_draft", [1, 4, 9])
def test_counters_equal_a_recount(tiny, prompts, kind, max_draft):
    batch = prompts[:4]
    books = Bookkeeper(kind(tiny.answers(batch, PARAMS), tiny.vocab_size))
    bench = Bench(tiny.folder, books, max_draft=max_draft, max_num_batched_tokens=40)
    for each in bench.generate(batch, PARAMS):
        heard = books.steps[each.request.request_id]
        drafted = [outcome.num_drafted for outcome in heard]
        accepted = [outcome.num_accepted for outcome in heard]
        stats = each.stats
        assert stats.num_steps == len(heard) == len(each.events)
        assert stats.num_drafts == sum(length > 0 for length in drafted)
        assert stats.num_drafted == sum(drafted)
        assert stats.num_accepted == sum(accepted)
        assert stats.num_emitted == len(each.token_ids) == sum(len(o.emitted) for o in heard)
        assert stats.offered_by_position == up_to(drafted)
        assert stats.accepted_by_position == up_to(accepted)
        assert stats.num_prompt_tokens == each.request.num_prompt
        assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
        assert [event.num_accepted for event in each.events] == accepted
    assert sum(each.stats.num_accepted for each in bench.seen) > 0


def test_rates_follow_their_formulas(tiny, prompts):
    batch = prompts[:2]
    drafter = RightThenWrong(tiny.answers(batch, PARAMS[0]), tiny.vocab_size)
    bench = Bench(tiny.folder, drafter, max_draft=4)
    for each in bench.generate(batch, PARAMS[0]):
        stats = each.stats
        # two right, one wrong, one right: three tokens a step, two of them drafted
        assert (stats.num_steps, stats.num_accepted, stats.num_emitted) == (9, 16, 25)
        assert stats.mean_acceptance_length == pytest.approx(25 / 9)
        assert stats.draft_acceptance_rate == pytest.approx(16 / stats.num_drafted)
        assert stats.acceptance_by_position == (1.0, 1.0, 0.0, 0.0)
        table = stats.to_dict()
        assert table["mean_acceptance_length"] == stats.mean_acceptance_length
        assert table["num_emitted"] == 25


def test_plain_decoding_has_no_acceptance(tiny, prompts):
    (each,) = Bench(tiny.folder).generate(prompts[:1], PARAMS[0])
    assert each.stats.mean_acceptance_length == 1
    assert each.stats.draft_acceptance_rate == 0
    assert each.stats.acceptance_by_position == ()


def test_counts_add_up(tiny, prompts):
    drafter = Oracle(tiny.answers(prompts, PARAMS[0]), tiny.vocab_size)
    bench = Bench(tiny.folder, drafter, max_draft=3)
    parts = [each.stats for each in bench.generate(prompts, PARAMS[0])]
    total = add_counts(parts)
    assert total.num_emitted == sum(part.num_emitted for part in parts) == 25 * len(prompts)
    assert total.num_drafted == sum(total.offered_by_position)
    assert total.num_accepted == sum(total.accepted_by_position)


def test_times_are_seconds_of_this_request(tiny, prompts):
    bench = Bench(tiny.folder)
    (each,) = bench.generate(prompts[:1], PARAMS[0])
    stats = each.stats
    assert 0 <= stats.queue_s <= stats.ttft_s <= stats.e2e_s
    assert stats.verify_s > 0
    assert stats.draft_s + stats.verify_s + stats.host_s <= stats.e2e_s - stats.queue_s + 0.05
    assert stats.tpot_s == pytest.approx((stats.e2e_s - stats.ttft_s) / 24)
