"""Drafts from what earlier requests of the same tenant were answered, and of nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reference.tiny_engine import Bench

from forerun.draft.suffix import SuffixDrafter
from forerun.draft.suffix_store import SuffixStore
from forerun.params import SamplingParams

PARAMS = [
    SamplingParams(temperature=0, max_tokens=40),
    SamplingParams(temperature=0.8, seed=11, max_tokens=40),
]


def bench_with_store(folder, max_tokens=4096, **options):
    store = SuffixStore(max_tokens, 3600, **options)
    return Bench(folder, SuffixDrafter(store)), store


def ask(bench, tiny, prompt, params, salt):
    """Ask with a salt; the answer must be the plain one. Returns what drafting did."""
    [generated] = bench.generate([prompt], replace(params, cache_salt=salt))
    assert tuple(generated.token_ids) == tiny.plain(prompt, params).token_ids
    stats = generated.stats
    assert stats.drafter_faults == {}
    return stats.num_drafted, stats.num_accepted


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])
def test_an_answer_is_drafted_from_for_the_same_salt_alone(tiny, prompts, params):
    prompt = prompts[0]
    alone = ask(Bench(tiny.folder, SuffixDrafter()), tiny, prompt, params, "")
    bench, _ = bench_with_store(tiny.folder)
    assert ask(bench, tiny, prompt, params, "a") == alone
    # To somebody else it is as if nobody had been here: not a draft more, not a draft less.
    assert ask(bench, tiny, prompt, params, "b") == alone
    assert ask(bench, tiny, prompt, params, "") == alone
    assert ask(bench, tiny, prompt, params, "") == alone
    _, accepted = ask(bench, tiny, prompt, params, "a")
    assert accepted > alone[1] + 20


def test_without_salts_only_where_the_operator_says_so(tiny, prompts):
    bench, _ = bench_with_store(tiny.folder, shared=True)
    first = ask(bench, tiny, prompts[0], PARAMS[0], "")
    _, accepted = ask(bench, tiny, prompts[0], PARAMS[0], "")
    assert accepted > first[1] + 20
    assert ask(bench, tiny, prompts[0], PARAMS[0], "a") == first


def test_a_cancelled_answer_is_kept_as_far_as_it_came(tiny, prompts):
    bench, store = bench_with_store(tiny.folder)
    generated = bench.add(prompts[0], replace(PARAMS[0], cache_salt="a"))
    while len(generated.token_ids) < 20:
        bench.step()
    bench.cancel(generated)
    assert store.num_tokens == len(generated.token_ids)
    _, accepted = ask(bench, tiny, prompts[0], PARAMS[0], "a")
    assert accepted > 10


def test_a_full_store_forgets_and_answers_stay_right(tiny, prompts):
    bench, store = bench_with_store(tiny.folder, max_tokens=200)
    accepted = 0
    for turn in range(3):
        for prompt in prompts:
            for salt in ("a", "b"):
                accepted += ask(bench, tiny, prompt, PARAMS[turn % 2], salt)[1]
                assert store.num_tokens <= 200
    assert store.num_tokens > 150
    assert accepted > 0
