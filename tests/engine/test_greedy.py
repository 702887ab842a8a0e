"""Greedy output with speculation equals the slow twin's, whatever the drafter does."""

from __future__ import annotations

import pytest
import torch
from reference.drafters import (
    Alternating,
    AlwaysWrong,
    Fake,
    Oracle,
    PastEnd,
    Random,
    RightThenWrong,
    TooLong,
)
from reference.tiny_engine import Bench

from forerun.draft.ngram import NgramDrafter
from forerun.engine.request import Request
from forerun.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=30)
KINDS = [Oracle, AlwaysWrong, RightThenWrong, TooLong, PastEnd, Alternating, Random]


def assert_plain(tiny, generated, params=GREEDY, **options):
    for each in generated:
        prompt = each.request.tokens[: each.request.num_prompt]
        want = tiny.plain(prompt, params, **options)
        assert tuple(each.token_ids) == want.token_ids
        assert (each.text, each.finish_reason) == (want.text, want.finish_reason)
        assert each.error is None
        assert each.stats.drafter_faults == {}


def totals(generated):
    stats = [each.stats for each in generated]
    return sum(s.num_drafted for s in stats), sum(s.num_accepted for s in stats)


@pytest.mark.parametrize("together", [True, False], ids=["batch", "alone"])
def test_plain_decoding_equals_the_slow_twin(tiny, prompts, together):
    bench = Bench(tiny.folder)
    if together:
        bench.generate(prompts, GREEDY)
    else:
        for prompt in prompts:
            bench.generate([prompt], GREEDY)
    assert_plain(tiny, bench.seen)
    assert totals(bench.seen) == (0, 0)


@pytest.mark.parametrize("max_draft", [1, 3, 7, 15])
@pytest.mark.parametrize("kind", KINDS)
def test_no_drafter_changes_greedy_output(tiny, prompts, kind, max_draft):
    answers = tiny.answers(prompts, GREEDY)
    bench = Bench(tiny.folder, kind(answers, tiny.vocab_size), max_draft=max_draft)
    bench.generate(prompts, GREEDY)
    assert_plain(tiny, bench.seen)
    drafted, accepted = totals(bench.seen)
    assert drafted > 0
    assert (accepted == 0) == (kind is AlwaysWrong)
    if kind in (Oracle, TooLong):
        assert accepted == drafted
        # the first step is the prompt's; each later one gives all its drafts and one token more
        assert bench.num_steps <= 2 + -(-30 // (max_draft + 1))
    assert max(len(each.stats.offered_by_position) for each in bench.seen) == max_draft


@pytest.mark.parametrize("kind", KINDS)
def test_no_drafter_changes_greedy_output_alone(tiny, prompts, kind):
    bench = Bench(tiny.folder, kind(tiny.answers(prompts, GREEDY), tiny.vocab_size), max_draft=5)
    for prompt in prompts[:4]:
        bench.generate([prompt], GREEDY)
    assert_plain(tiny, bench.seen)
    assert totals(bench.seen)[0] > 0


def test_an_empty_drafter_is_plain_decoding(tiny, prompts):
    bench = Bench(tiny.folder, Fake())
    bench.generate(prompts, GREEDY)
    assert_plain(tiny, bench.seen)
    assert all(each.stats.num_steps == len(each.token_ids) for each in bench.seen)


@pytest.mark.parametrize("max_draft", [1, 3, 7, 15])
def test_ngram_drafts_change_nothing(repeating, prompts, max_draft):
    params = SamplingParams(temperature=0, max_tokens=60)
    for batch in (prompts, prompts[3:4]):
        bench = Bench(repeating.folder, NgramDrafter(2, 4), max_draft=max_draft)
        bench.generate(batch, params)
        assert_plain(repeating, bench.seen, params)
        drafted, accepted = totals(bench.seen)
        assert 0 < accepted < drafted


@pytest.mark.parametrize("kernels", ["numba", "compiled"])
@pytest.mark.parametrize("drafter", ["none", "oracle"])
def test_the_compiled_kernels_give_the_same_text(tiny_compiled, prompts, drafter, kernels):
    answers = tiny_compiled.answers(prompts, GREEDY)
    chosen = {
        "none": None,
        "oracle": RightThenWrong(answers, tiny_compiled.vocab_size),
    }[drafter]
    bench = Bench(tiny_compiled.folder, chosen, kernels=kernels, block_size=32)
    bench.generate(prompts, GREEDY)
    assert_plain(tiny_compiled, bench.seen)
    drafted, accepted = totals(bench.seen)
    assert (drafted > 0) == (drafter != "none")
    assert (accepted > 0) == (drafter != "none")


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_drafts_change_nothing_of_a_quantised_model(tiny_compiled, prompts, temperature):
    """Eight bits change what the model says; what it says then, drafts do not change."""
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=30)
    options = {"kernels": "auto", "block_size": 32}
    found = {}
    for quantize in ("none", "int8"):
        alone = []
        for prompt in prompts:
            bench = Bench(tiny_compiled.folder, quantize=quantize, **options)
            alone.append(bench.generate([prompt], params)[0].token_ids)
        found[quantize] = alone
        drafting = Bench(
            tiny_compiled.folder, NgramDrafter(1, 4), quantize=quantize, max_draft=7, **options
        )
        assert [each.token_ids for each in drafting.generate(prompts, params)] == alone
        assert sum(each.stats.num_drafted for each in drafting.seen) > 0
    assert found["none"] != found["int8"]


@pytest.mark.parametrize("poison", [False, True])
def test_the_short_way_decides_as_the_long_one_does(repeating, prompts, monkeypatch, poison):
    """Plain greedy batches are decided without tensors (`verify`); the slow twin is the rest."""
    params = SamplingParams(temperature=0, max_tokens=60)
    seen = []
    for short in (True, False):
        if not short:
            monkeypatch.setattr(Request, "is_plainly_greedy", False)
        bench = Bench(repeating.folder, NgramDrafter(1, 4), max_draft=7)
        if poison:  # rows of one token are NaN
            bench.decoder._embedding[prompts[2][-1]] = torch.nan
        bench.generate(prompts, params)
        stats = [(each.stats.num_accepted, each.stats.num_drafted) for each in bench.seen]
        seen.append(([(each.token_ids, str(each.error)) for each in bench.seen], stats))
        assert sum(accepted for accepted, _ in stats) > 0
        assert any(each.error for each in bench.seen) == poison
    assert seen[0] == seen[1]


def test_a_draft_that_is_nearly_as_likely_is_still_rejected(tiny, prompts):
    """litgpt's hole: a draft token that is not the argmax must go, however probable it is."""

    class RunnerUp(Oracle):
        def guess(self, request):
            tokens, draft = list(request.tokens), []
            for _ in range(min(2, request.max_draft)):
                row = torch.tensor(tiny.model.next_logits(tokens))
                draft.append(int(row.topk(2).indices[1]))
                tokens.append(draft[-1])
            return draft

    bench = Bench(tiny.folder, RunnerUp(tiny.answers(prompts, GREEDY), tiny.vocab_size))
    bench.generate(prompts[:3], GREEDY)
    assert_plain(tiny, bench.seen)
    drafted, accepted = totals(bench.seen)
    assert drafted > 0
    assert accepted == 0
