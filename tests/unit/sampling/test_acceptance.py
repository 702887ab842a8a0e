"""Acceptance rules on ragged batches: whose rows are whose, lengths, padding, edges."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.params import SamplingParams
from forerun.sampling import (
    FilterParams,
    Stream,
    accept_block,
    accept_samples,
    accept_tokens,
    sample_tokens,
    uniforms,
)
from forerun.types import Outcome, Proposal

SIZE = 11
RULES = pytest.mark.parametrize("rule", [accept_tokens, accept_block])


def by_hand(samples: list[int], drafts: list[list[int]]) -> tuple[list[int], list[int]]:
    """Slow twin of the point-mass rule."""
    counts, tokens, start = [], [], 0
    for draft in drafts:
        rows = samples[start : start + len(draft) + 1]
        n = 0
        while n < len(draft) and draft[n] == rows[n]:
            n += 1
        counts.append(n)
        tokens.append(rows[n])
        start += len(draft) + 1
    return counts, tokens


def assert_outcome(outcome: Outcome, num_accepted: list[int], next_tokens: list[int]) -> None:
    assert outcome.num_accepted.tolist() == num_accepted
    assert outcome.next_tokens.tolist() == next_tokens
    assert outcome.num_accepted.dtype == outcome.next_tokens.dtype == torch.int64


def test_drafts_are_kept_while_they_equal_the_samples():
    samples = torch.tensor([1, 2, 3, 9, 5, 6, 7])
    outcome = accept_samples(samples, Proposal.from_lists([[1, 2, 4], [], [6]]))
    assert_outcome(outcome, [2, 0, 1], [3, 5, 7])


def test_a_match_after_a_mismatch_counts_for_nothing():
    outcome = accept_samples(torch.tensor([1, 8, 3, 4]), Proposal.from_lists([[1, 2, 3]]))
    assert_outcome(outcome, [1], [8])


def test_padding_never_matches():
    """The shorter draft is padded with 0, which is also the sample there."""
    samples = torch.tensor([5, 0, 0, 0, 0, 0])
    outcome = accept_samples(samples, Proposal.from_lists([[5], [0, 0, 0]]))
    assert_outcome(outcome, [1, 3], [0, 0])


def test_samples_rule_equals_its_slow_twin():
    rng = random.Random(1)
    for _ in range(200):
        drafts = [
            [rng.randrange(2) for _ in range(rng.randrange(5))] for _ in range(rng.randrange(7))
        ]
        samples = [rng.randrange(2) for _ in range(sum(len(d) + 1 for d in drafts))]
        outcome = accept_samples(
            torch.tensor(samples, dtype=torch.int64), Proposal.from_lists(drafts)
        )
        assert_outcome(outcome, *by_hand(samples, drafts))


def test_plain_decoding_is_a_proposal_of_nothing():
    assert_outcome(accept_samples(torch.tensor([4, 5, 6]), Proposal.empty(3)), [0] * 3, [4, 5, 6])
    probs = torch.eye(SIZE)[[4, 5, 6]]
    noise = torch.rand(3, dtype=torch.float64)
    for rule in (accept_tokens, accept_block):
        outcome = rule(probs, Proposal.empty(3), torch.zeros(3, 0, dtype=torch.float64), noise)
        assert_outcome(outcome, [0] * 3, [4, 5, 6])


def test_no_requests_give_no_outcome():
    nothing = torch.zeros(0, dtype=torch.float64)
    assert_outcome(accept_samples(torch.zeros(0, dtype=torch.int64), Proposal.empty(0)), [], [])
    for rule in (accept_tokens, accept_block):
        outcome = rule(torch.zeros(0, SIZE), Proposal.empty(0), nothing.reshape(0, 0), nothing)
        assert_outcome(outcome, [], [])


def ragged(lengths: list[int], seed: int) -> tuple[Tensor, Proposal, Tensor, Tensor]:
    """Random distributions with zeros in them; what lies in the padding is garbage on purpose."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)

    def dists(*shape: int) -> Tensor:
        weights = torch.rand(*shape, SIZE, generator=generator)
        weights = weights * (torch.rand(*shape, SIZE, generator=generator) > 0.3)
        weights[..., 0] += 0.01
        return weights / weights.sum(-1, keepdim=True)

    q = dists(len(lengths), width)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).reshape(-1, width)
    padding = torch.arange(width) >= torch.tensor(lengths)[:, None]
    q[padding] = 0
    tokens[padding] = SIZE - 1
    proposal = Proposal(tokens, torch.tensor(lengths), q)
    noise = torch.rand(len(lengths), width + 1, generator=generator, dtype=torch.float64)
    return dists(sum(lengths) + len(lengths)), proposal, noise[:, :-1], noise[:, -1]


@RULES
def test_requests_do_not_see_each_other(rule):
    seen = set()
    for seed in range(40):
        lengths = [3, 0, 1, 5, 2, 0, 4]
        probs, proposal, accept, recover = ragged(lengths, seed)
        together = rule(probs, proposal, accept, recover)
        start = 0
        for b, length in enumerate(lengths):
            rows = slice(start, start + length + 1)
            alone = Proposal(
                proposal.tokens[b : b + 1, :length],
                proposal.lengths[b : b + 1],
                proposal.probs[b : b + 1, :length],
            )
            outcome = rule(probs[rows], alone, accept[b : b + 1, :length], recover[b : b + 1])
            assert outcome.num_accepted == together.num_accepted[b]
            assert outcome.next_tokens == together.next_tokens[b]
            seen.add((length, int(outcome.num_accepted)))
            start += length + 1
    assert {(3, n) for n in range(4)} <= seen


@RULES
def test_a_draft_without_probabilities_is_certain_of_its_tokens(rule):
    for seed in range(20):
        probs, proposal, accept, recover = ragged([3, 0, 1, 5], seed)
        one_hot = torch.nn.functional.one_hot(proposal.tokens, SIZE).float()
        told = rule(probs, Proposal(proposal.tokens, proposal.lengths, one_hot), accept, recover)
        untold = rule(probs, Proposal(proposal.tokens, proposal.lengths, None), accept, recover)
        assert torch.equal(told.num_accepted, untold.num_accepted)
        assert torch.equal(told.next_tokens, untold.next_tokens)


@RULES
def test_a_token_that_the_target_excludes_never_survives(rule):
    """Not even at noise 0; and the recovered token is one that the target allows."""
    target = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    proposal = Proposal(torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[[0.9, 0.1, 0.0]]]))
    zero = torch.zeros(1, dtype=torch.float64)
    assert_outcome(rule(target, proposal, zero[None], zero), [0], [1])


@RULES
def test_a_token_that_the_draft_says_it_cannot_draw_is_no_error(rule):
    """q = 0 for a drafted token is a drafter's lie; the outcome is a token of the target."""
    target = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])
    for token in range(3):
        q = torch.tensor([[[0.5, 0.5, 0.5]]])
        q[..., token] = 0
        half = torch.full((1,), 0.5, dtype=torch.float64)
        proposal = Proposal(torch.tensor([[token]]), torch.tensor([1]), q)
        assert int(rule(target, proposal, half[None], half).next_tokens) in (1, 2)


@RULES
def test_rounding_that_leaves_no_residual_falls_back_to_the_target(rule):
    """p is q but for its last bit, and the noise is as close to 1 as it gets."""
    p = torch.tensor([[0.25, 0.75], [0.25, 0.75]])
    q = torch.tensor([[[0.25, 0.75]]]).nextafter(torch.tensor(1.0))
    proposal = Proposal(torch.tensor([[1]]), torch.tensor([1]), q)
    noise = torch.full((1,), 1 - 2.0**-53, dtype=torch.float64)
    assert_outcome(rule(p, proposal, noise[None], noise), [0], [1])


def test_seeded_tokens_are_the_same_with_and_without_drafts():
    """Point mass: whatever is guessed, however much, the tokens are those of plain decoding."""
    table = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(2)) * 1.5
    params = SamplingParams(temperature=0.9, top_k=7, top_p=0.95)
    seed, length = 17, 60

    def sample(contexts: list[int], first: int) -> Tensor:  # after each token, from position first
        positions = np.arange(first, first + len(contexts), dtype=np.int64)
        noise = uniforms(np.full(len(contexts), seed, np.uint64), positions, Stream.TARGET)
        filters = FilterParams.from_params([params] * len(contexts))
        return sample_tokens(table[contexts], filters, noise)

    plain = [3]
    while len(plain) < length:
        plain.append(int(sample(plain[-1:], len(plain))))
    rng = random.Random(4)
    for most in (1, 3, 8):
        text, num_accepted = [3], 0
        while len(text) < length:
            truth = plain[len(text) : len(text) + rng.randint(0, most)]
            draft = [t if rng.random() < 0.8 else rng.randrange(SIZE) for t in truth]
            samples = sample([text[-1], *draft], len(text))
            outcome = accept_samples(samples, Proposal.from_lists([draft]))
            n = int(outcome.num_accepted)
            text += [*draft[:n], int(outcome.next_tokens)]
            num_accepted += n
        assert text[:length] == plain
        assert num_accepted > 5
