"""One seed, one text: with speculation or without, in any company, preempted or not (float32)."""

from __future__ import annotations

import pytest
from reference.drafters import Oracle, RightThenWrong
from reference.tiny_engine import Bench

from forerun.draft.ngram import NgramDrafter
from forerun.params import SamplingParams

MIXES = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 8},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 2.5, "top_k": 40, "top_p": 0.99},
]
SEEDS = [0, 1, 17, 2**32 + 5, 2**63 - 1, 2**63, 2**64 - 1, 123456789]


def params(max_tokens=24):
    return [
        SamplingParams(**mix, seed=seed, max_tokens=max_tokens)
        for mix, seed in zip(MIXES, SEEDS, strict=True)
    ]


def assert_plain(tiny, generated, wanted):
    for each, own in zip(generated, wanted, strict=True):
        prompt = each.request.tokens[: each.request.num_prompt]
        want = tiny.plain(prompt, own)
        assert tuple(each.token_ids) == want.token_ids
        assert each.text == want.text


def test_seeds_matter(tiny, prompts):
    """What the equalities below compare is not one text over and over."""
    texts = {
        tiny.plain(prompts[0], SamplingParams(seed=seed, max_tokens=24)).token_ids for seed in SEEDS
    }
    assert len(texts) == len(SEEDS)


@pytest.mark.parametrize("max_draft", [0, 1, 3, 7, 15])
@pytest.mark.parametrize("together", [True, False], ids=["batch", "alone"])
def test_speculation_and_company_do_not_matter(tiny, prompts, max_draft, together):
    wanted = params()
    answers = tiny.answers(prompts, wanted)
    bench = Bench(tiny.folder, RightThenWrong(answers, tiny.vocab_size), max_draft=max_draft)
    if together:
        bench.generate(prompts, wanted)
    else:
        for prompt, own in zip(prompts, wanted, strict=True):
            bench.generate([prompt], own)
    assert_plain(tiny, bench.seen, wanted)
    accepted = sum(each.stats.num_accepted for each in bench.seen)
    assert (accepted > 0) == (max_draft > 0)
    assert all(each.stats.num_accepted > 0 for each in bench.seen) == (max_draft > 0)


def test_ngram_drafts_do_not_matter(repeating, prompts):
    # a low temperature, so that the text repeats itself now and then
    own = [SamplingParams(temperature=0.4, seed=s, top_p=0.95, max_tokens=40) for s in SEEDS]
    bench = Bench(repeating.folder, NgramDrafter(1, 4))
    bench.generate(prompts, own)
    assert_plain(repeating, bench.seen, own)
    drafted = sum(each.stats.num_drafted for each in bench.seen)
    assert 0 < sum(each.stats.num_accepted for each in bench.seen) < drafted


def test_preemption_and_pieces_do_not_matter(tiny, prompts):
    wanted = params()
    answers = tiny.answers(prompts, wanted)
    bench = Bench(
        tiny.folder, RightThenWrong(answers, tiny.vocab_size), cache_blocks=16, max_model_len=128,
        max_num_batched_tokens=20, max_num_seqs=8,
    )  # fmt: skip
    bench.generate(prompts, wanted)
    assert_plain(tiny, bench.seen, wanted)
    assert sum(each.stats.num_preemptions for each in bench.seen) > 0
    assert sum(each.stats.num_accepted for each in bench.seen) > 0


def test_another_company_does_not_matter(tiny, prompts):
    """The same request among greedy, filtered and unfiltered strangers."""
    own = SamplingParams(seed=7, temperature=0.9, top_k=12, max_tokens=20)
    want = tiny.plain(prompts[0], own).token_ids
    for company in ([], MIXES[5:6] * 3, MIXES[:1] * 2, MIXES[2:4], MIXES[4:]):
        bench = Bench(tiny.folder)
        strangers = [SamplingParams(**mix, seed=99, max_tokens=20) for mix in company]
        first = bench.generate([prompts[0], *prompts[1 : 1 + len(company)]], [own, *strangers])[0]
        assert tuple(first.token_ids) == want


def test_one_prompt_with_many_seeds_at_once(tiny, prompts):
    own = [SamplingParams(seed=seed, temperature=1.2, max_tokens=12) for seed in SEEDS]
    batch = [prompts[3]] * len(SEEDS)

    class Mixed(Oracle):
        """All share their prompt, so some of its guesses belong to another request."""

        def guess(self, request):
            first = self.future(request)[: request.max_draft]
            return first[: 1 + len(request.tokens) % 4]

        def future(self, request):
            answer = self.answers[request.request_id]
            return answer[len(request.tokens) :]

    bench = Bench(tiny.folder, Mixed(tiny.answers(batch, own), tiny.vocab_size))
    generated = bench.generate(batch, own)
    assert_plain(tiny, generated, own)
    assert all(each.stats.num_accepted > 0 for each in generated)
