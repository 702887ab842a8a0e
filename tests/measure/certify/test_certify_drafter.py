"""The certificate's drafter draws from exactly the probabilities that it states."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from forerun.engine.drafts import find_fault, read_drafts
from forerun.measure.certify.drafter import PerturbedTarget
from forerun.measure.certify.statistics import compare_with_exact
from forerun.types import DraftRequest, Proposal

VOCABULARY = 12
PROMPT = [3, 5, 7]
AFTER = {
    (): {2: 0.5, 7: 0.3, 11: 0.2},
    (2,): {0: 0.9, 1: 0.1},
    (7,): {4: 1.0},
    (11,): {0: 0.25, 5: 0.25, 6: 0.5},
}


def propose(requests: list[DraftRequest], seed: int = 9) -> Proposal:
    return PerturbedTarget(VOCABULARY, seed, len(PROMPT), AFTER).propose(requests)


def test_a_distribution_worked_out_by_hand():
    q = propose([DraftRequest(0, PROMPT, 1)]).probs[0, 0]
    # 0.5 * 0.4, 0.3 * 1.6, 0.2 * 1.6: together 1
    assert q[[2, 7, 11]].tolist() == pytest.approx([0.2, 0.48, 0.32])
    assert q.count_nonzero() == 3


def test_it_follows_what_was_committed():
    q = propose([DraftRequest(0, [*PROMPT, 2], 1), DraftRequest(1, [*PROMPT, 7], 1)]).probs
    assert q[0, 0, [0, 1]].tolist() == pytest.approx([0.36 / 0.52, 0.16 / 0.52])
    assert q[1, 0, 4] == 1


def test_draws_follow_the_stated_probabilities():
    num = 20_000
    proposal = propose([DraftRequest(i, PROMPT, 2) for i in range(num)])
    pairs = Counter(map(tuple, proposal.tokens.tolist()))
    stated = {}
    for (a, b), p, q in zip(proposal.tokens.tolist(), *proposal.probs.unbind(1), strict=True):
        stated[a, b] = float(p[a].double() * q[b].double())
    total = sum(stated.values())
    assert total == pytest.approx(1, abs=1e-6)
    test = compare_with_exact(pairs, {pair: p / total for pair, p in stated.items()})
    assert test.df >= 4
    assert test.p_value > 1e-3


def test_lengths_are_those_asked_for_and_the_engine_takes_them():
    requests = [DraftRequest(4, PROMPT, 2), DraftRequest(7, [*PROMPT, 2], 1)]
    requests.append(DraftRequest(8, PROMPT, 0))
    proposal = propose(requests)
    assert proposal.lengths.tolist() == [2, 1, 0]
    for draft, request in zip(read_drafts(proposal, 3), requests, strict=True):
        assert find_fault(draft, request.max_draft, VOCABULARY) is None


def test_a_request_does_not_mind_its_company():
    requests = [DraftRequest(i, PROMPT, 2) for i in range(30)]
    together = propose(requests)
    for index, request in enumerate(requests):
        alone = propose([request])
        assert torch.equal(alone.tokens[0], together.tokens[index])
        assert torch.equal(alone.probs[0], together.probs[index])
    assert len({tuple(row) for row in together.tokens.tolist()}) > 2


def test_nothing_is_asked():
    assert propose([]).lengths.tolist() == []
    assert propose([DraftRequest(0, PROMPT, 0)]).lengths.tolist() == [0]
