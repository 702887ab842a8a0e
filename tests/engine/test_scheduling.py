"""Chunks, preemption, shared prefixes, cancellation, coming and going: the text stays the same.

The bench checks after every step that each block is owned by exactly those who may own it.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.drafters import AlwaysWrong, Fake, Oracle, RightThenWrong, TooLong
from reference.tiny_engine import Bench

from forerun.draft.ngram import NgramDrafter
from forerun.params import SamplingParams
from forerun.types import FinishReason

GREEDY = SamplingParams(temperature=0, max_tokens=30)


def oracle(tiny, prompts, kind=RightThenWrong, params=GREEDY, **options):
    return kind(tiny.answers(prompts, params, **options), tiny.vocab_size)


def assert_plain(tiny, generated, params=GREEDY, **options):
    for each in generated:
        prompt = each.request.tokens[: each.request.num_prompt]
        want = tiny.plain(prompt, params, **options)
        assert tuple(each.token_ids) == want.token_ids
        assert each.text == want.text
        assert each.finish_reason == want.finish_reason


@pytest.mark.parametrize("budget", [1, 2, 5, 16, 33])
def test_prompts_in_small_pieces(tiny, prompts, budget):
    bench = Bench(
        tiny.folder, oracle(tiny, prompts),
        max_num_batched_tokens=budget, max_num_seqs=min(4, budget), enable_prefix_caching=False,
    )  # fmt: skip
    sizes = []
    forward = bench.machinery.runner.forward

    def watched(step, wanted=None):
        sizes.append(len(step.token_ids))
        return forward(step, wanted)

    bench.machinery.runner.forward = watched
    assert_plain(tiny, bench.generate(prompts, GREEDY))
    assert max(sizes) <= budget
    accepted = sum(each.stats.num_accepted for each in bench.seen)
    assert (accepted > 0) == (budget > 1)  # a budget of one token leaves none for drafts


def test_a_long_prompt_does_not_stop_the_others(tiny, prompts):
    """While a prompt is read in pieces, whoever decodes gets a token every step."""
    bench = Bench(tiny.folder, max_num_batched_tokens=16, max_num_seqs=4)
    first = bench.add(prompts[0], GREEDY)
    bench.step()
    long = bench.add(prompts[7] * 4, GREEDY)
    while not long.token_ids:
        assert len(bench.step()) >= 1
    assert len(first.token_ids) > 10
    bench.run()
    assert_plain(tiny, bench.seen)


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("kind", [None, TooLong, RightThenWrong, AlwaysWrong])
def test_preemption_changes_nothing(tiny, prompts, kind, sharing):
    drafter = None if kind is None else oracle(tiny, prompts, kind)
    bench = Bench(
        tiny.folder, drafter, cache_blocks=16, max_model_len=128, enable_prefix_caching=sharing
    )
    assert_plain(tiny, bench.generate(prompts, GREEDY))
    assert sum(each.stats.num_preemptions for each in bench.seen) > 0
    if kind in (TooLong, RightThenWrong):
        assert sum(each.stats.num_accepted for each in bench.seen) > 0


def test_the_youngest_gives_way(tiny, prompts):
    """The oldest of those that decode is never preempted."""
    bench = Bench(tiny.folder, cache_blocks=16, max_model_len=128)
    generated = bench.generate([prompts[7][:16]] + [prompts[6][:16]] * 5, GREEDY)
    counts = [each.stats.num_preemptions for each in generated]
    assert counts[0] == 0
    assert counts[-1] > 0


def test_who_gave_way_does_not_come_back_in_the_same_step(tiny, prompts):
    """It would take blocks again that somebody needs, and be preempted again."""
    bench = Bench(tiny.folder, cache_blocks=16, max_model_len=128)
    scheduler, schedule = bench.machinery.scheduler, bench.machinery.scheduler.schedule
    seen = []

    def watched(now_s):
        before = {each.request_id: each.counters.num_preemptions for each in scheduler.unfinished()}
        plan = schedule(now_s)
        running = {entry.request.request_id for entry in plan.entries}
        for each in scheduler.unfinished():
            if each.counters.num_preemptions > before[each.request_id]:
                seen.append(each.request_id in running)
        return plan

    scheduler.schedule = watched
    bench.generate([prompts[7][:16]] + [prompts[6][:16]] * 5, GREEDY)
    assert seen
    assert not any(seen)


def test_who_gave_way_comes_back_before_newcomers_start(tiny, prompts):
    bench = Bench(tiny.folder, cache_blocks=16, max_model_len=128, max_num_seqs=4)
    batch = [bench.add(prompts[7][:16], GREEDY) for _ in range(4)]
    while not any(each.stats.num_preemptions for each in batch):
        bench.step()
    newcomer = bench.add(prompts[1], GREEDY)
    while newcomer.request.scheduled_s is None:
        assert bench.core.has_work
        bench.step()
    assert all(each.finish_reason or each.request.num_computed for each in batch)
    bench.run()
    assert_plain(tiny, bench.seen)


def test_preemption_with_prompts_in_pieces(tiny, prompts):
    bench = Bench(
        tiny.folder, oracle(tiny, prompts), cache_blocks=16, max_model_len=128,
        max_num_batched_tokens=12, max_num_seqs=8,
    )  # fmt: skip
    assert_plain(tiny, bench.generate(prompts, GREEDY))
    assert sum(each.stats.num_preemptions for each in bench.seen) > 0


def test_drafts_never_push_anybody_out(tiny, prompts):
    """With room for plain decoding and none for drafts, nobody is preempted."""
    batch = [prompts[0][:8], prompts[2][:8]]
    params = SamplingParams(temperature=0, max_tokens=24)  # 8 + 24 = 4 blocks of 8 each
    drafter = oracle(tiny, batch, TooLong, params)
    bench = Bench(tiny.folder, drafter, cache_blocks=8, max_model_len=64, max_draft=15)
    assert_plain(tiny, bench.generate(batch, params), params)
    assert [each.stats.num_preemptions for each in bench.seen] == [0, 0]
    assert sum(each.stats.num_accepted for each in bench.seen) > 0


def test_a_shared_prefix_is_found_and_changes_nothing(tiny, prompts):
    prefix = prompts[7]
    batch = [[*prefix, *prompt] for prompt in prompts[:4]]
    for sharing in (True, False):
        bench = Bench(tiny.folder, oracle(tiny, batch), enable_prefix_caching=sharing)
        for prompt in batch:
            bench.generate([prompt], GREEDY)
        assert_plain(tiny, bench.seen)
        cached = [each.stats.num_cached_tokens for each in bench.seen]
        expected = len(prefix) // 8 * 8
        assert cached[0] == 0
        assert all(count >= expected if sharing else count == 0 for count in cached[1:])
        assert any(each.stats.num_accepted for each in bench.seen)


def test_equal_blocks_after_different_beginnings_are_not_shared(tiny, prompts):
    """A block's keys and values depend on everything before it."""
    block = prompts[7][:8]
    batch = [[*start, *block * 3, 65] for start in (prompts[0][:8], prompts[2][:8], block)]
    bench = Bench(tiny.folder)
    for prompt in batch:
        (each,) = bench.generate([prompt], GREEDY)
        assert each.stats.num_cached_tokens == 0
    assert_plain(tiny, bench.seen)


def test_a_prompt_that_is_all_cached_still_gets_its_logits(tiny, prompts):
    """A prompt of whole blocks, asked twice: its last token is computed anew."""
    prompt = prompts[7][:64]
    bench = Bench(tiny.folder)
    bench.generate([prompt], GREEDY)
    (again,) = bench.generate([prompt], GREEDY)
    assert again.stats.num_cached_tokens == 56
    assert_plain(tiny, bench.seen)


def test_an_answer_becomes_the_next_prompts_prefix(tiny, prompts):
    """A chat goes on: committed output is found by hash, rejected drafts never are."""
    bench = Bench(tiny.folder, oracle(tiny, [prompts[0]], RightThenWrong))
    (first,) = bench.generate([prompts[0]], GREEDY)
    longer = [*prompts[0], *first.token_ids, 65, 66]
    bench.core._drafter._drafter = Fake()
    (second,) = bench.generate([longer], GREEDY)
    assert second.stats.num_cached_tokens >= (len(longer) - 3) // 8 * 8 - 8
    assert_plain(tiny, bench.seen)


def test_drafts_are_never_found_by_hash(tiny, prompts):
    """A prompt that equals a rejected draft's text finds only what was committed."""
    wrong = AlwaysWrong(tiny.answers([prompts[7]], GREEDY), tiny.vocab_size)
    bench = Bench(tiny.folder, wrong, max_draft=15)
    drafted = []
    propose = wrong.propose

    def spy(requests):
        for request in requests:
            drafted.append((len(request.tokens), [*request.tokens, *wrong.guess(request)]))
        return propose(requests)

    wrong.propose = spy
    bench.generate([prompts[7]], GREEDY)
    assert len(drafted) > 10
    bench.core._drafter._drafter = Fake()
    for committed, tokens in drafted[::6]:
        (each,) = bench.generate([[*tokens, 65]], GREEDY)
        assert committed - 8 < each.stats.num_cached_tokens <= committed
    assert_plain(tiny, bench.seen)


def test_cancelling_frees_within_one_step(tiny, prompts):
    bench = Bench(tiny.folder, oracle(tiny, prompts))
    batch = [bench.add(prompt, GREEDY) for prompt in prompts]
    bench.step()
    bench.step()
    for each in batch[::2]:
        tokens = list(each.token_ids)
        bench.cancel(each)
        assert each.finish_reason == FinishReason.CANCELLED
        assert each.request.blocks == []
        assert each.token_ids == tokens
        want = tiny.plain(each.request.tokens[: each.request.num_prompt], GREEDY).token_ids
        assert tuple(tokens) == want[: len(tokens)]
        assert each.text == tiny.codec.decode(tokens)
    bench.run()
    assert_plain(tiny, batch[1::2])


def test_cancelling_twice_or_too_late_does_nothing(tiny, prompts):
    bench = Bench(tiny.folder)
    (done,) = bench.generate([prompts[0]], GREEDY)
    assert bench.core.cancel(done.request.request_id) is None
    assert bench.core.cancel(12345) is None
    waiting = bench.add(prompts[1], GREEDY)
    bench.cancel(waiting)
    assert waiting.finish_reason == FinishReason.CANCELLED
    assert bench.core.cancel(waiting.request.request_id) is None
    assert not bench.core.has_work


def test_cancelling_one_that_was_preempted(tiny, prompts):
    bench = Bench(tiny.folder, cache_blocks=16, max_model_len=128)
    batch = [bench.add(prompt, GREEDY) for prompt in prompts]
    preempted = None
    while preempted is None:
        bench.step()
        preempted = next((each for each in batch if each.stats.num_preemptions), None)
    bench.cancel(preempted)
    bench.run()
    assert_plain(tiny, [each for each in batch if each is not preempted])


def test_coming_and_going_between_steps(tiny, prompts):
    bench = Bench(tiny.folder, oracle(tiny, prompts), max_num_seqs=3)
    late = iter(prompts)
    while bench.core.has_work or len(bench.seen) < len(prompts):
        if bench.num_steps % 2 == 0 and len(bench.seen) < len(prompts):
            bench.add(next(late), GREEDY)
        bench.step()
    bench.run()
    assert_plain(tiny, bench.seen)


def test_first_come_first_served(tiny, prompts):
    """With one place only, requests end in the order in which they came."""
    bench = Bench(tiny.folder, max_num_seqs=1)
    batch = [bench.add(prompt, GREEDY) for prompt in prompts[:4]]
    order = []
    while bench.core.has_work:
        order += [e.request_id for e in bench.step() if e.finish_reason is not None]
    assert order == [each.request.request_id for each in batch]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    dice=st.integers(0, 2**32),
    blocks=st.integers(16, 40),
    budget=st.integers(4, 60),
    places=st.integers(1, 4),
    max_draft=st.integers(0, 9),
    sharing=st.booleans(),
)
def test_anything_goes(tiny, prompts, dice, blocks, budget, places, max_draft, sharing):
    """Random arrivals and cancellations under random limits, with a drafter of mixed quality."""
    dice = random.Random(dice)
    kind = dice.choice([Oracle, RightThenWrong, AlwaysWrong, TooLong])
    pool = [*prompts, [*prompts[7], *prompts[0]], [*prompts[7], *prompts[3]]]
    context = {"max_model_len": 128}  # some of these prompts leave less room than they ask for
    bench = Bench(
        tiny.folder, oracle(tiny, pool, kind, **context), cache_blocks=blocks, max_model_len=128,
        max_num_batched_tokens=max(budget, places), max_num_seqs=places, max_draft=max_draft,
        enable_prefix_caching=sharing,
    )  # fmt: skip
    left = 8
    while left or bench.core.has_work:
        if left and dice.random() < 0.5:
            bench.add(dice.choice(pool), GREEDY)
            left -= 1
        if dice.random() < 0.05 and bench.seen:
            bench.cancel(dice.choice(bench.seen))
        bench.step()
        assert bench.num_steps < 3000
    bench.run()
    ended = [each for each in bench.seen if each.finish_reason != FinishReason.CANCELLED]
    assert_plain(tiny, ended, **context)


def test_ngram_under_pressure(repeating, prompts):
    params = SamplingParams(temperature=0, max_tokens=40)
    bench = Bench(
        repeating.folder, NgramDrafter(1, 4), cache_blocks=16, max_model_len=128,
        max_num_batched_tokens=24, max_num_seqs=8,
    )  # fmt: skip
    assert_plain(repeating, bench.generate(prompts, params), params)
    stats = [each.stats for each in bench.seen]
    assert sum(s.num_preemptions for s in stats) > 0
    assert sum(s.num_accepted for s in stats) > 0
