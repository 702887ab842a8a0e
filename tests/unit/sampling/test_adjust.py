"""Adjusted logits, row by row against the slow twin; log-probabilities of single rows beside it."""

from __future__ import annotations

import math
import random

import pytest
import torch
from reference.adjust_slow import DEAD, NothingLeftError, adjusted_row, log_probs, log_softmax
from reference.filters_slow import filtered_row

from forerun.params import SamplingParams
from forerun.sampling import (
    FilterParams,
    History,
    TokenCounts,
    TokenRules,
    adjust_logits,
    collect_adjustments,
    processed_logprobs,
    raw_logprobs,
    read_logprobs,
)

VOCAB = 40


class Made:
    """A request with random rules and texts: for the package, and for the twin."""

    def __init__(self, dice, **fixed) -> None:
        def some(most):
            return [dice.randrange(VOCAB) for _ in range(dice.randrange(most + 1))]

        def maybe(value, otherwise):
            return value if dice.random() < 0.4 else otherwise

        self.prompt = [dice.randrange(VOCAB), *some(8)]
        self.output, self.draft = some(6), some(7)
        text = [*self.prompt, *self.output, *self.draft]
        words = [(token,) for token in maybe(some(2), [])]
        for _ in range(maybe(4, 0)):  # some that the text completes, some that it does not
            first = dice.randrange(len(text))
            words.append((*text[first : first + dice.randrange(1, 4)], dice.randrange(VOCAB)))
        bias = {dice.randrange(VOCAB): dice.uniform(-9, 9) for _ in range(maybe(6, 0))}
        self.given = {
            "allowed_token_ids": maybe(dice.sample(range(VOCAB), 25), None),
            "banned_token_ids": maybe(some(9), []),
            "stop_token_ids": maybe(some(3), []),
            "min_tokens": maybe(dice.randrange(12), 0),
            "logit_bias": bias,
            "repetition_penalty": maybe(dice.choice([0.3, 1.2, 2.0]), 1.0),
            "frequency_penalty": maybe(dice.choice([-1.0, 0.3, 2.0]), 0.0),
            "presence_penalty": maybe(dice.choice([-0.7, 1.5]), 0.0),
        } | fixed
        self.words = words
        self.params = SamplingParams(**self.given)

    @property
    def num_rows(self) -> int:
        return len(self.draft) + 1

    def rules(self) -> TokenRules:
        p = self.params
        return TokenRules(
            bias_ids=tuple(token for token, _ in p.bias_pairs),
            biases=tuple(bias for _, bias in p.bias_pairs),
            allowed=p.allowed_token_ids,
            banned=(*p.banned_token_ids, *(word[0] for word in self.words if len(word) == 1)),
            bad_words=tuple(word for word in self.words if len(word) > 1),
            stop_ids=p.stop_token_ids,
            min_tokens=p.min_tokens,
            presence=p.presence_penalty,
            frequency=p.frequency_penalty,
            repetition=p.repetition_penalty,
        )

    def history(self) -> History:
        rules, counts = self.rules(), None
        if rules.penalises:
            counts = TokenCounts(self.prompt, with_prompt=rules.repetition != 1)
            counts.append(self.output)
        return History(
            rules, counts, [*self.prompt, *self.output], len(self.output), tuple(self.draft)
        )

    def slow(self, logits) -> list[list[float]]:
        rows = []
        for index, row in enumerate(logits.tolist()):
            output = [*self.output, *self.draft[:index]]
            try:
                rows.append(
                    adjusted_row(row, self.prompt, output, self.params, (), self.words)
                )  # fmt: skip
            except NothingLeftError:
                rows.append([DEAD] * VOCAB)
        return rows


def random_logits(num_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB, generator=generator) * 4


def adjusted(batch, logits):
    found = collect_adjustments([each.history() for each in batch])
    return logits.clone() if found is None else adjust_logits(logits.clone(), found)


def assert_rows(got, want):
    want = torch.tensor(want, dtype=torch.float64)
    assert torch.equal(got == DEAD, want == DEAD)
    alive = want > DEAD
    assert torch.allclose(got.double()[alive], want[alive], rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("seed", range(40))
def test_ragged_batches_are_the_twins(seed):
    dice = random.Random(seed)
    batch = [Made(dice) for _ in range(dice.choice([1, 2, 7]))]
    logits = random_logits(sum(each.num_rows for each in batch), seed)
    got = adjusted(batch, logits)
    want = []
    for each, rows in zip(batch, logits.split([each.num_rows for each in batch]), strict=True):
        want += each.slow(rows)
    assert_rows(got, want)


OPTIONS = {
    "allowed_token_ids": [3, 5, 5, 8], "banned_token_ids": [1, 1, 2], "logit_bias": {4: 2.5},
    "repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5,
}  # fmt: skip
NOTHING = {
    "allowed_token_ids": None, "banned_token_ids": [], "stop_token_ids": [], "min_tokens": 0,
    "logit_bias": {}, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_alone(name):
    for seed in range(5):
        each = Made(random.Random(seed), **(NOTHING | {name: OPTIONS[name]}))
        each.words = []
        each.output = [4, 4, 9, *each.output]
        logits = random_logits(each.num_rows, seed)
        got = adjusted([each], logits)
        assert not torch.equal(got, logits)
        assert_rows(got, each.slow(logits))


def test_rows_are_the_same_alone_and_in_company():
    """To the bit, in any order of the batch."""
    dice = random.Random(1)
    batch = [Made(dice) for _ in range(12)]
    sizes = [each.num_rows for each in batch]
    rows = random_logits(sum(sizes), 1).split(sizes)
    together = adjusted(batch, torch.cat(rows)).split(sizes)
    order = dice.sample(range(12), 12)
    shuffled = adjusted([batch[i] for i in order], torch.cat([rows[i] for i in order]))
    pieces = dict(zip(order, shuffled.split([sizes[i] for i in order]), strict=True))
    for index, each in enumerate(batch):
        assert torch.equal(adjusted([each], rows[index]), together[index])
        assert torch.equal(pieces[index], together[index])


def test_a_row_is_the_same_behind_a_draft_and_behind_output():
    """Row i of a draft is row 0 of the request that has committed i of its tokens."""
    for seed in range(12):
        each = Made(random.Random(seed))
        logits = random_logits(each.num_rows, seed)
        whole = adjusted([each], logits)
        output, draft = each.output, each.draft
        for index in range(len(draft) + 1):
            each.output, each.draft = [*output, *draft[:index]], []
            assert torch.equal(adjusted([each], logits[index : index + 1])[0], whole[index])


def test_requests_without_rules_are_not_touched():
    dice = random.Random(2)
    plain = [Made(dice, **NOTHING) for _ in range(3)]
    for each in plain:
        each.words = []
        assert each.rules().is_empty
    assert collect_adjustments([each.history() for each in plain]) is None
    assert collect_adjustments([]) is None
    batch = [plain[0], Made(dice, **OPTIONS), plain[1], Made(dice, **OPTIONS), plain[2]]
    sizes = [each.num_rows for each in batch]
    logits = random_logits(sum(sizes), 2)
    before, after = logits.split(sizes), adjusted(batch, logits).split(sizes)
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [
        True, False, True, False, True,
    ]  # fmt: skip


def test_min_tokens_that_are_there_touch_nothing():
    each = Made(random.Random(3), **(NOTHING | {"min_tokens": 2, "stop_token_ids": [7, 8]}))
    each.words, each.output, each.draft = [], [1], [7, 2, 8]
    logits = random_logits(4, 3)
    got = adjusted([each], logits)
    assert got[0, [7, 8]].tolist() == [DEAD, DEAD]
    assert torch.equal(got[1:], logits[1:])
    assert_rows(got, each.slow(logits))


def test_words_are_completed_across_prompt_output_and_draft():
    each = Made(random.Random(4), **NOTHING)
    each.prompt, each.output, each.draft = [1, 2], [3], [4, 5]
    each.words = [(2, 3, 10), (1, 2, 3, 4, 11), (3, 4, 5, 12), (5, 13), (1, 2, 14), (9, 1, 2, 15)]
    logits = random_logits(3, 4)
    got = adjusted([each], logits)
    assert [(row == DEAD).nonzero().flatten().tolist() for row in got] == [[10], [11], [12, 13]]
    longer = (0, *each.prompt, *each.output, *each.draft, 9)  # longer than the text
    each.words.append(longer)
    assert torch.equal(adjusted([each], logits), got)


def test_counts_are_only_read():
    each = Made(random.Random(5), **(NOTHING | {"frequency_penalty": 1.0}))
    each.words, each.output, each.draft = [], [7], [7, 9]
    history = each.history()
    found = [collect_adjustments([history]) for _ in range(2)]
    logits = random_logits(3, 5)
    first, second = (adjust_logits(logits.clone(), each) for each in found)
    assert torch.equal(first, second)
    lowered = (logits - first).round().to(int)
    assert [lowered[row, [7, 9]].tolist() for row in range(3)] == [[1, 0], [2, 0], [2, 1]]
    assert lowered.sum() == 6


def test_counts_grow_as_the_output_does():
    at_once, step_by_step = (TokenCounts([1, 2, 2], with_prompt=True) for _ in range(2))
    output = [3, 3, 1, 9, 3]
    at_once.append(output)
    for token in output:
        step_by_step.append([token])
    rules = TokenRules(presence=0.5, frequency=0.3, repetition=1.4)
    logits = random_logits(3, 6)
    rows = [
        adjust_logits(
            logits.clone(),
            collect_adjustments([History(rules, counts, [1, 2, 2, *output], 5, (3, 8))]),
        )
        for counts in (at_once, step_by_step)
    ]
    assert torch.equal(*rows)


def test_it_works_in_place():
    each = Made(random.Random(7), **OPTIONS)
    logits = random_logits(each.num_rows, 7)
    want = adjusted([each], logits)
    assert adjust_logits(logits, collect_adjustments([each.history()])) is logits
    assert torch.equal(logits, want)


# ---- log-probabilities of rows


def test_raw_logprobs():
    logits = random_logits(9, 8)
    got = raw_logprobs(logits)
    want = torch.tensor([log_softmax(row) for row in logits.tolist()], dtype=torch.float64)
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "filters",
    [{"temperature": 1.0}, {"temperature": 0}, {"temperature": 0.5, "top_k": 5},
     {"temperature": 1.5, "top_p": 0.8}, {"min_p": 0.05}],
    ids=repr,
)  # fmt: skip
def test_processed_logprobs(filters):
    params = SamplingParams(**filters)
    logits = random_logits(9, 9) / 3  # wide ones would show that weights are whole numbers
    logits[:, ::3] = DEAD  # as adjusting leaves them
    got = processed_logprobs(logits.clone(), FilterParams.from_params([params] * 9))
    for row, logprobs in zip(logits.tolist(), got.tolist(), strict=True):
        slow = filtered_row(row, params.temperature, params.top_k, params.top_p, params.min_p)
        for value, want in zip(logprobs, log_probs(slow.probs), strict=True):
            assert value == want or value == pytest.approx(want, abs=1e-5)


def test_reading_logprobs():
    rows = torch.log_softmax(random_logits(4, 10), -1)
    rows[2, 3:] = DEAD
    tokens, counts = [7, 11, 1, 0], [5, 0, 20, VOCAB]
    for got, row, token, count in zip(
        read_logprobs(rows, tokens, counts), rows.tolist(), tokens, counts, strict=True
    ):
        assert got.token_id == token
        assert got.logprob == row[token]
        assert got.rank == 1 + sum(value > row[token] for value in row)
        best = sorted(((i, x) for i, x in enumerate(row) if x > DEAD), key=lambda pair: -pair[1])
        assert list(got.top) == best[:count]
        assert all(math.isfinite(value) for _, value in got.top)


def test_equally_likely_tokens_share_a_rank():
    rows = torch.log(torch.tensor([[0.25, 0.125, 0.25, 0.25, 0.125]]))
    assert [read_logprobs(rows, [i], [2])[0].rank for i in range(5)] == [1, 4, 1, 1, 4]
    assert {i for i, _ in read_logprobs(rows, [1], [3])[0].top} == {0, 2, 3}
