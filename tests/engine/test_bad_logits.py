"""NaN logits and failing passes: whom they hit, and whom they must not."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from reference.drafters import Fake, Oracle
from reference.tiny_engine import Bench

from forerun.draft.base import NoDrafter
from forerun.errors import CapacityError, ForerunError, InvalidLogits
from forerun.params import SamplingParams
from forerun.types import FinishReason

GREEDY = SamplingParams(temperature=0, max_tokens=20)
POISON = 303  # an id that no text has: its embedding becomes NaN
KERNELS = pytest.mark.parametrize("kernels", ["torch", "numba", "compiled"])


def poisoned(tiny_compiled, kernels, drafter=None, **options):
    bench = Bench(tiny_compiled.folder, drafter, kernels=kernels, block_size=32, **options)
    if kernels == "compiled":  # a token's row is one lane of a panel, and may be the head's too
        weights = bench.decoder._weights
        table = weights.embedding.copy()
        nan = 0x7FC07FC0 if table.dtype == np.uint32 else np.nan
        table[0, POISON // 16, :, POISON % 16] = nan
        bench.decoder._weights = weights._replace(embedding=table)
    else:
        bench.decoder._embedding[POISON] = torch.nan
    return bench


def assert_untouched(tiny, each, params=GREEDY):
    prompt = each.request.tokens[: each.request.num_prompt]
    want = tiny.plain(prompt, params)
    assert each.error is None
    assert tuple(each.token_ids) == want.token_ids
    assert each.text == want.text


def assert_invalid(each):
    assert each.finish_reason == FinishReason.ERROR
    assert isinstance(each.error, InvalidLogits)
    assert str(each.request.request_id) in str(each.error)
    assert str(len(each.request.tokens)) in str(each.error)


@KERNELS
def test_nan_ends_one_request_and_leaves_its_neighbours(tiny_compiled, prompts, kernels):
    batch = [prompts[0], [*prompts[3], POISON], prompts[2], prompts[7]]
    oracle = Oracle(tiny_compiled.answers([batch[0], *batch[2:]], GREEDY), 304)

    class Careful(Oracle):
        def guess(self, request):
            return [] if request.tokens[-1] == POISON else super().guess(request)

    bench = poisoned(tiny_compiled, kernels, Careful(oracle.answers, 304))
    generated = bench.generate(batch, GREEDY)
    assert_invalid(generated[1])
    assert generated[1].token_ids == []
    for each in (generated[0], *generated[2:]):
        assert_untouched(tiny_compiled, each)
        assert each.stats.num_accepted > 0


@KERNELS
def test_nan_does_not_lie_in_wait_in_freed_blocks(tiny_compiled, prompts, kernels):
    """The cache holds one request only, so the next one gets the very blocks."""
    bench = poisoned(tiny_compiled, kernels, cache_blocks=4, max_model_len=128)
    for prompt in prompts:
        (bad,) = bench.generate([[*prompt[:4], POISON, *prompt]], GREEDY)
        assert_invalid(bad)
        (good,) = bench.generate([prompt], GREEDY)
        assert_untouched(tiny_compiled, good)


@KERNELS
@pytest.mark.parametrize("end", ["cancel", "forward", "preempt"])
def test_nan_of_a_request_that_ended_otherwise(tiny_compiled, prompts, kernels, end, caplog):
    """A prompt in chunks may fill blocks with NaN long before its first logits are looked at."""
    bench = poisoned(
        tiny_compiled, kernels, cache_blocks=4, max_model_len=128,
        max_num_batched_tokens=70, max_num_seqs=2,
    )  # fmt: skip
    bad = bench.add([POISON] * 100, GREEDY)
    bench.step()
    assert bad.request.num_computed == 70
    if end == "cancel":
        bench.cancel(bad)
    elif end == "forward":
        forward, bench.machinery.runner.forward = bench.machinery.runner.forward, _raise
        bench.step()
        bench.machinery.runner.forward = forward
    else:
        bench.machinery.scheduler._preempt(bad.request)
        bench.core.check_integrity()
        bench.cancel(bad)
    for prompt in prompts:
        (good,) = bench.generate([prompt], GREEDY)
        assert_untouched(tiny_compiled, good)


@KERNELS
def test_a_failing_request_does_not_wipe_a_prefix_that_others_use(tiny_compiled, kernels):
    """Two requests share their first blocks; one goes bad while the other runs."""
    prefix = tiny_compiled.codec.encode("the quick brown fox jumps over the lazy dog, " * 3)
    assert len(prefix) > 64
    good_prompt, bad_prompt = [*prefix, 65, 66], [*prefix, POISON]
    bench = poisoned(tiny_compiled, kernels)
    good = bench.add(good_prompt, GREEDY)
    bench.step()
    bad = bench.add(bad_prompt, GREEDY)
    bench.run()
    assert bad.stats.num_cached_tokens >= 64, "no prefix was shared: nothing is tested"
    assert_invalid(bad)
    assert_untouched(tiny_compiled, good)
    # and whoever finds the prefix by hash afterwards gets it whole
    (after,) = bench.generate([good_prompt], GREEDY)
    assert_untouched(tiny_compiled, after)


@KERNELS
def test_a_prompt_that_failed_fails_again(tiny_compiled, prompts, kernels):
    """Its first blocks were published before anything was noticed; nobody may build on them."""
    bench = poisoned(tiny_compiled, kernels, max_num_batched_tokens=40, max_num_seqs=4)
    prompt = [*prompts[0], POISON, *prompts[7], *prompts[0]]
    for _ in range(2):
        (each,) = bench.generate([prompt], GREEDY)
        assert_invalid(each)
        assert each.stats.num_cached_tokens == 0


@KERNELS
def test_a_draft_cannot_break_an_answer_by_what_it_computes(tiny_compiled, prompts, kernels):
    """The drafted token's own values are NaN. Plain decoding never meets it; nor may the answer."""

    class Poisoner(Oracle):
        def guess(self, request):
            return [*super().guess(request)[:2], POISON][: request.max_draft]

    batch = [prompts[0], prompts[4]]
    answers = tiny_compiled.answers(batch, GREEDY)
    assert all(POISON not in answer for answer in answers)
    bench = poisoned(tiny_compiled, kernels, Poisoner(answers, 304))
    for each in bench.generate(batch, GREEDY):
        assert_untouched(tiny_compiled, each)


@KERNELS
def test_nan_of_a_rejected_draft_does_not_lie_in_wait(tiny_compiled, prompts, kernels):
    """Rejected positions are truncated; whoever gets those blocks must not read them."""

    class Poisoner(Fake):
        def guess(self, request):
            return [POISON] * request.max_draft if request.request_id == 0 else []

    bench = poisoned(tiny_compiled, kernels, Poisoner(), cache_blocks=4, max_model_len=128)
    bench.generate([prompts[7]], GREEDY)
    for prompt in prompts:
        (good,) = bench.generate([prompt], GREEDY)
        assert_untouched(tiny_compiled, good)


def test_infinite_logits_are_invalid_too(tiny, prompts):
    bench = Bench(tiny.folder)
    forward = bench.machinery.runner.forward

    def infinite(step, wanted=None):
        logits, features = forward(step, wanted)
        logits = logits.clone()
        logits[1, 7] = torch.inf
        return logits, features

    bench.machinery.runner.forward = infinite
    first, second = bench.add(prompts[0], GREEDY), bench.add(prompts[1], GREEDY)
    bench.step()
    bench.machinery.runner.forward = forward
    bench.run()
    assert_untouched(tiny, first)
    assert_invalid(second)


def _raise(step, wanted=None):
    raise RuntimeError("the pass broke at layer 17")


def test_a_pass_that_raises_ends_its_requests_and_not_the_engine(tiny, prompts, caplog):
    bench = Bench(tiny.folder, max_num_seqs=2)
    inside = [bench.add(prompt, GREEDY) for prompt in prompts[:2]]
    waiting = bench.add(prompts[2], GREEDY)
    bench.step()
    forward, bench.machinery.runner.forward = bench.machinery.runner.forward, _raise
    bench.step()
    bench.machinery.runner.forward = forward
    for each in inside:
        assert each.finish_reason == FinishReason.ERROR
        assert type(each.error) is ForerunError
        assert "layer 17" in str(each.error)
        assert isinstance(each.error.__cause__, RuntimeError)
    assert waiting.finish_reason is None
    bench.run()
    assert_untouched(tiny, waiting)
    assert "layer 17" in caplog.text


def test_running_out_of_memory_names_the_way_out(tiny, prompts, caplog):
    caplog.set_level(logging.CRITICAL)
    bench = Bench(tiny.folder, NoDrafter())

    def out_of_memory(step, wanted=None):
        raise torch.OutOfMemoryError("no")

    bench.machinery.runner.forward = out_of_memory
    each = bench.add(prompts[0], GREEDY)
    bench.run()
    assert isinstance(each.error, CapacityError)
    assert "max_num_batched_tokens" in str(each.error)


@pytest.mark.parametrize("top_k", [2**31, 2**63, 10**30])
def test_an_extreme_option_of_one_request_leaves_the_others_alone(tiny, prompts, top_k):
    """Whatever SamplingParams lets through must not take down a step."""
    bench = Bench(tiny.folder)
    other = bench.add(prompts[0], GREEDY)
    extreme = bench.add(
        prompts[1], SamplingParams(seed=1, top_k=top_k, max_tokens=20, temperature=0.8)
    )
    bench.run()
    assert_untouched(tiny, other)
    assert_untouched(tiny, extreme, SamplingParams(seed=1, max_tokens=20, temperature=0.8))
