"""A draft can fail, an answer cannot: each fault ends in plain decoding there, and is counted."""

from __future__ import annotations

import logging

import pytest
import torch
from reference.drafters import Bookkeeper, Fake, Oracle, Raising, Shaped, Spoilt, proposal
from reference.tiny_engine import Bench

from forerun.params import SamplingParams
from forerun.types import Proposal

GREEDY = SamplingParams(temperature=0, max_tokens=16)
BROKEN = 1  # the request that things go wrong for


def run(tiny, prompts, make, **options):
    """Run four requests with `make(oracle)` as their drafter; each must get its plain answer."""
    prompts = prompts[:4]
    oracle = Oracle(tiny.answers(prompts, GREEDY), tiny.vocab_size)
    bench = Bench(tiny.folder, make(oracle), **options)
    generated = bench.generate(prompts, GREEDY)
    for each, prompt in zip(generated, prompts, strict=True):
        want = tiny.plain(prompt, GREEDY)
        assert each.error is None
        assert tuple(each.token_ids) == want.token_ids
        assert each.text == want.text
    return generated


def assert_only_broken(generated, reason, others_draft=True):
    for index, each in enumerate(generated):
        stats = each.stats
        if index == BROKEN:
            assert stats.drafter_faults == {reason: 1}
        else:
            assert stats.drafter_faults == {}
            assert not others_draft or stats.num_accepted == stats.num_drafted > 5


@pytest.mark.parametrize("verb", ["start", "propose", "finish"])
def test_an_exception_costs_one_request_its_drafts(tiny, prompts, verb, caplog):
    caplog.set_level(logging.WARNING)
    generated = run(tiny, prompts, lambda oracle: Raising(oracle, verb, BROKEN))
    assert_only_broken(generated, f"{verb}_failed")
    assert f"{verb}_failed" in caplog.text
    if verb != "finish":
        assert generated[BROKEN].stats.num_drafted == 0


def test_an_exception_in_observe_ends_in_plain_decoding(tiny, prompts, caplog):
    generated = run(tiny, prompts, lambda oracle: Raising(oracle, "observe", BROKEN))
    assert generated[BROKEN].stats.drafter_faults == {"observe_failed": 1}
    # It was drafting before: in the step that went wrong, not after it.
    assert generated[BROKEN].stats.num_drafts <= 1


def test_an_exception_in_observe_leaves_the_others_their_drafts(tiny, prompts, caplog):
    generated = run(tiny, prompts, lambda oracle: Raising(oracle, "observe", BROKEN))
    assert_only_broken(generated, "observe_failed")


def test_a_request_that_lost_its_drafter_does_not_cost_the_others_theirs(tiny, prompts, caplog):
    """A drafter keeps state from `start`; one whose start failed has none to observe with."""

    class Stateful(Fake):
        def __init__(self, inner):
            self.inner, self.state = inner, {}

        def start(self, request):
            if request.request_id == BROKEN:
                raise RuntimeError("no memory for another one")
            self.state[request.request_id] = 0

        def guess(self, request):
            return self.inner.guess(request)

        def observe(self, outcomes, features):
            for outcome in outcomes:
                self.state[outcome.request_id] += outcome.num_accepted

    assert_only_broken(run(tiny, prompts, Stateful), "start_failed")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda draft: [*draft[:1], 10**6], "token_outside_vocabulary"),
        (lambda draft: [*draft[:1], 2**62], "token_outside_vocabulary"),
        (lambda draft: [-1], "token_outside_vocabulary"),
        (lambda draft: [*draft, -(2**63)], "token_outside_vocabulary"),
    ],
)
def test_a_token_that_does_not_exist(tiny, prompts, spoil, reason, caplog):
    generated = run(tiny, prompts, lambda oracle: Spoilt(oracle, BROKEN, spoil))
    assert_only_broken(generated, reason)


def test_the_first_id_outside_the_vocabulary(tiny, prompts, caplog):
    for token, faults in ((tiny.vocab_size, 1), (tiny.vocab_size - 1, 0)):
        generated = run(
            tiny, prompts, lambda oracle, t=token: Spoilt(oracle, BROKEN, lambda draft: [t])
        )
        assert sum(generated[BROKEN].stats.drafter_faults.values()) == faults


def rows(tokens, lengths, dtype=torch.int64):
    """Say that every request gets this row, whatever it may be."""
    return lambda n: proposal([tokens] * n, [lengths] * n, dtype)


MALFORMED = {  # from the number of requests
    "nothing": lambda n: None,
    "a list": lambda n: [[1, 2]] * n,
    "one row too few": lambda n: proposal(torch.ones(n - 1, 1).tolist(), [1] * (n - 1)),
    "one row too many": lambda n: proposal([[1]] * (n + 1), [1] * (n + 1)),
    "lengths of another batch": lambda n: proposal([[1]] * n, [1] * (n + 1)),
    "flat tokens": rows(1, 1),
    "lengths in a column": rows([1], [1]),
    "negative lengths": rows([1], -1),
    "lengths beyond the width": rows([1], 2),
    "float tokens": rows([1.5], 1, torch.float32),
    "NaN tokens": rows([torch.nan], 1, torch.float32),
    "float lengths": rows([1], 1.0),
    "fractional lengths": rows([1], 0.5),
    "NaN lengths": rows([1], torch.nan),
    "lists for tensors": lambda n: Proposal([[1]] * n, [1] * n, None),
}


@pytest.mark.parametrize("together", [True, False], ids=["batch", "alone"])
@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_proposal(tiny, prompts, kind, together, caplog):
    """Every request decodes plainly, and its fault is counted once."""
    batch = prompts if together else prompts[:1]
    generated = run(tiny, batch, lambda _: Shaped(lambda requests: MALFORMED[kind](len(requests))))
    for each in generated:
        assert sum(each.stats.drafter_faults.values()) == 1
        assert each.stats.num_drafted == 0


def test_a_malformed_row_for_one_request(tiny, prompts, caplog):
    def make(oracle):
        def shaped(requests):
            good = oracle.propose(requests)
            lengths = good.lengths.clone()
            for row, request in enumerate(requests):
                if request.request_id == BROKEN:
                    lengths[row] = good.tokens.shape[1] + 3
            return Proposal(good.tokens, lengths, None)

        return Shaped(shaped)

    assert_only_broken(run(tiny, prompts, make), "bad_length")


def test_padding_is_never_looked_at(tiny, prompts):
    """What lies beyond a row's length may be anything."""

    def make(oracle):
        def shaped(requests):
            good = oracle.propose(requests)
            tokens = torch.full((len(requests), good.tokens.shape[1] + 2), -5)
            for row, length in enumerate(good.lengths.tolist()):
                tokens[row, :length] = good.tokens[row, :length]
            return Proposal(tokens, good.lengths, None)

        return Shaped(shaped)

    for each in run(tiny, prompts, make):
        assert each.stats.drafter_faults == {}
        assert each.stats.num_accepted == each.stats.num_drafted > 5


def test_a_drafter_that_tampers_with_the_request(tiny, prompts, caplog):
    """A drafter sees a request's tokens; it must not be able to change the answer through them."""

    class Tampering(Fake):
        def propose(self, requests):
            for request in requests:
                try:
                    request.tokens.append(5)
                except (AttributeError, TypeError):
                    continue
            return Proposal.empty(len(requests))

    run(tiny, prompts, lambda _: Tampering())


def test_a_drafter_that_tampers_with_its_proposal_afterwards(tiny, prompts):
    class Late(Oracle):
        def propose(self, requests):
            self.last = super().propose(requests)
            return self.last

        def observe(self, outcomes, features):
            self.last.tokens.fill_(-7)

    run(tiny, prompts, lambda oracle: Late(oracle.answers, oracle.vocab_size))


def test_a_drafter_is_told_everything_once_and_in_order(tiny, prompts):
    """start, then propose and observe, then finish; never anything after finish."""
    prompts = prompts[:4]
    books = Bookkeeper(Oracle(tiny.answers(prompts, GREEDY), tiny.vocab_size))
    bench = Bench(tiny.folder, books, max_draft=3)
    bench.generate(prompts, GREEDY)
    assert sorted(books.finished) == [0, 1, 2, 3]
    for each in bench.seen:
        outcomes = books.steps[each.request.request_id]
        assert [token for o in outcomes for token in o.emitted] == each.token_ids
        assert [o.finished for o in outcomes] == [False] * (len(outcomes) - 1) + [True]
    assert books.complaints == []


def test_a_cancelled_request_is_taken_from_its_drafter(tiny, prompts):
    books = Bookkeeper(Fake())
    bench = Bench(tiny.folder, books)
    running, waiting = bench.add(prompts[0], GREEDY), None
    bench.step()
    waiting = bench.add(prompts[1], GREEDY)
    bench.cancel(waiting)
    bench.cancel(running)
    assert sorted(books.finished) == [0, 1]
    assert books.complaints == []
