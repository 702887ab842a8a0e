"""The certificate's drafter draws from exactly the probabilities that it states."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from forerun.engine.drafts import find_fault, read_drafts
from forerun.measure.certify.drafter import SampledLookup
from forerun.measure.certify.statistics import compare_with_exact
from forerun.sampling import Stream, derive_seed, sample_from_probs, uniforms
from forerun.types import DraftRequest, Proposal

VOCABULARY = 12
CONTEXT = [3, 5, 7, 3, 5, 8, 3, 0, 3, 5]
SEED = 9


def propose(requests: list[DraftRequest], seed: int = SEED) -> Proposal:
    drafter = SampledLookup(VOCABULARY, seed)
    for request in requests:
        drafter.start(request)
    return drafter.propose(requests)


def test_a_distribution_worked_out_by_hand():
    """After 5 came 7, then 8; of ten tokens four are 3, three 5, and 0, 7, 8 one each."""
    q = propose([DraftRequest(0, CONTEXT, 1)]).probs[0, 0].double()
    assert q[8] == pytest.approx(0.7 * 1 / 1.8 + 0.3 * 0.1)
    assert q[7] == pytest.approx(0.7 * 0.8 / 1.8 + 0.3 * 0.1)
    assert q[[0, 3, 5]].tolist() == pytest.approx([0.03, 0.12, 0.09])
    assert q.count_nonzero() == 5
    assert float(q.sum()) == pytest.approx(1)


def test_a_last_token_that_nothing_followed_leaves_the_frequencies():
    q = propose([DraftRequest(0, [4, 4, 4, 6], 1)]).probs[0, 0]
    assert q[[4, 6]].tolist() == pytest.approx([0.75, 0.25])
    alone = propose([DraftRequest(0, [11], 2)])
    assert alone.tokens.tolist() == [[11, 11]]
    assert alone.probs[0, :, 11].tolist() == [1, 1]


def test_draws_follow_the_stated_probabilities():
    """Three tokens of 20,000 requests: jointly, and each after the token that came before it."""
    num = 20_000
    proposal = propose([DraftRequest(i, CONTEXT, 3) for i in range(num)])
    first = {token: float(p) for token, p in enumerate(proposal.probs[0, 0].double()) if p}
    # which distribution was stated after each first token
    after = dict(zip(proposal.tokens[:, 0].tolist(), proposal.probs[:, 1].tolist(), strict=True))
    # the drafts are a Markov chain, so the table after the first token is that after the second
    joint = {
        (a, b, c): first[a] * after[a][b] * after[b][c]
        for a in first for b in first for c in first
    }  # fmt: skip
    total = sum(joint.values())
    joint = {key: p / total for key, p in joint.items()}
    test = compare_with_exact(Counter(map(tuple, proposal.tokens.tolist())), joint)
    assert test.df > 50
    assert test.p_value > 1e-3


def test_what_is_drawn_from_is_what_is_stated_to_the_bit():
    requests = [
        DraftRequest(4, CONTEXT, 3),
        DraftRequest(7, [0, 0, 9], 1),
        DraftRequest(8, [1, 2] * 20, 0),
        DraftRequest(9, list(range(12)) * 4, 2),
    ]
    proposal = propose(requests)
    assert proposal.lengths.tolist() == [3, 1, 0, 2]
    for row, request in enumerate(requests):
        for i in range(request.max_draft):
            at = np.array([len(request.tokens)], np.int64)
            seeds = np.array([derive_seed(SEED, request.request_id)], np.uint64)
            noise = uniforms(seeds, at + i, Stream.DRAFT, at)
            drawn = sample_from_probs(proposal.probs[row, i : i + 1], noise)
            assert int(drawn) == int(proposal.tokens[row, i])
        assert not proposal.tokens[row, request.max_draft :].any()
        assert not proposal.probs[row, request.max_draft :].any()


def test_the_engine_finds_no_fault():
    requests = [DraftRequest(i, CONTEXT * (i + 1), i % 4) for i in range(8)]
    drafts = read_drafts(propose(requests), len(requests))
    for draft, request in zip(drafts, requests, strict=True):
        assert find_fault(draft, request.max_draft, VOCABULARY) is None


def test_a_request_gets_the_same_in_company_and_in_steps():
    mine = DraftRequest(5, CONTEXT, 2)
    alone = propose([mine])
    company = propose([DraftRequest(1, list(range(12)), 3), mine])
    assert company.tokens[1, :2].tolist() == alone.tokens[0].tolist()
    assert torch.equal(company.probs[1, :2], alone.probs[0])
    drafter = SampledLookup(VOCABULARY, SEED)
    drafter.start(mine)
    for length in range(1, len(CONTEXT) + 1):  # the context grows between steps
        grown = drafter.propose([DraftRequest(5, CONTEXT[:length], 2)])
    assert torch.equal(grown.tokens, alone.tokens)
    assert torch.equal(grown.probs, alone.probs)


def test_seed_request_and_step_change_the_noise():
    def drawn(seed: int, request_id: int, context: list[int]) -> list[int]:
        return propose([DraftRequest(request_id, context, 16)], seed).tokens[0].tolist()

    base = drawn(1, 0, CONTEXT)
    assert base == drawn(1, 0, CONTEXT)
    assert base != drawn(2, 0, CONTEXT)
    assert base != drawn(1, 1, CONTEXT)
    assert base != drawn(1, 0, CONTEXT * 2)


def test_nothing_asked_for_is_nothing_drafted():
    proposal = propose([DraftRequest(0, CONTEXT, 0), DraftRequest(1, CONTEXT, 0)])
    assert proposal.tokens.shape == (2, 0)
    assert SampledLookup(VOCABULARY, SEED).propose([]).tokens.shape == (0, 0)


def test_a_longer_draft_than_agreed_is_refused():
    drafter = SampledLookup(VOCABULARY, SEED, max_draft=3)
    drafter.start(DraftRequest(0, CONTEXT, 3))
    assert drafter.propose([DraftRequest(0, CONTEXT, 3)]).tokens.shape == (1, 3)
    with pytest.raises(AssertionError, match="contract"):
        drafter.propose([DraftRequest(0, CONTEXT, 4)])


def test_a_finished_request_is_forgotten():
    drafter = SampledLookup(VOCABULARY, SEED)
    drafter.start(DraftRequest(0, CONTEXT, 1))
    drafter.finish(0)
    drafter.finish(0)
    assert not drafter._contexts
