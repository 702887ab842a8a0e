"""Negative controls: the mistakes that others shipped must fail the check of exactness.

Each wrong rule is integrated as exactly as the right ones, so it fails because it is wrong.
"""

from __future__ import annotations

import random
from collections import defaultdict
from fractions import Fraction
from itertools import product

import pytest
import torch
from test_acceptance_exact import (
    BLOCK,
    TOKEN,
    Dist,
    Model,
    Rule,
    Tokens,
    argmax,
    block_leftover,
    block_passes,
    call,
    cells,
    chain_prob,
    cuts,
    integrate,
    is_lossless,
    normalised,
    random_model,
    same_everywhere,
    sharpened,
    token_leftover,
    token_passes,
)
from torch import Tensor

from forerun.sampling import accept_block, accept_tokens, sample_from_probs
from forerun.types import Outcome, Proposal


def grid(target_probs: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor, Tensor]:
    """Give p [B, K + 1, V], q [B, K, V] and p / q of the drafted tokens, all of full length."""
    size, k = proposal.tokens.shape
    p = target_probs.reshape(size, k + 1, -1).double()
    q = proposal.probs.double()
    of_tokens = proposal.tokens.unsqueeze(-1)
    return p, q, (p[:, :k].gather(-1, of_tokens) / q.gather(-1, of_tokens)).squeeze(-1)


def finish(p: Tensor, q: Tensor, n: Tensor, v: Tensor, bonus: Tensor) -> Outcome:
    each, k = torch.arange(len(n)), q.shape[1]
    residual = (p[each, n] - q[each, n.clamp_max(k - 1)]).clamp_min(0)
    return Outcome(n, sample_from_probs(torch.where((n < k)[:, None], residual, bonus), v))


def inverted_ratio(target_probs: Tensor, proposal: Proposal, u: Tensor, v: Tensor) -> Outcome:
    p, q, ratios = grid(target_probs, proposal)
    n = (u < 1 / ratios).long().cumprod(-1).sum(-1)
    return finish(p, q, n, v, p[:, -1])


def no_residual(target_probs: Tensor, proposal: Proposal, u: Tensor, v: Tensor) -> Outcome:
    p, _, ratios = grid(target_probs, proposal)
    n = (u < ratios).long().cumprod(-1).sum(-1)
    return Outcome(n, sample_from_probs(p[torch.arange(len(n)), n], v))


def bonus_of_draft(target_probs: Tensor, proposal: Proposal, u: Tensor, v: Tensor) -> Outcome:
    p, q, ratios = grid(target_probs, proposal)
    n = (u < ratios).long().cumprod(-1).sum(-1)
    return finish(p, q, n, v, q[:, -1])


def first_failure_block(target_probs: Tensor, proposal: Proposal, u: Tensor, v: Tensor) -> Outcome:
    """Block verification that stops at the first failure: vllm-ascend PR #11985's "correction"."""
    p, q, ratios = grid(target_probs, proposal)
    k = q.shape[1]
    chain = [torch.ones(len(u), dtype=torch.float64)]
    passed = []
    for i in range(k):
        chain.append((chain[-1] * ratios[:, i]).clamp_max(1))
        h = chain[-1]
        if i + 1 < k:
            z = (h[:, None] * p[:, i + 1] - q[:, i + 1]).clamp_min(0).sum(-1)
            h = torch.where(h >= 1, 1.0, z / (z + 1 - h))
        passed.append(u[:, i] < h)
    n = torch.stack(passed, dim=1).long().cumprod(-1).sum(-1)
    scale = torch.stack(chain, dim=1).gather(-1, n[:, None])[..., None]
    return finish(p * torch.where((n < k)[:, None, None], scale, 1), q, n, v, p[:, -1])


def token_shared(target_probs: Tensor, proposal: Proposal, u: Tensor, _: Tensor) -> Outcome:
    return accept_tokens(target_probs, proposal, u, u[:, 0])


def block_shared(target_probs: Tensor, proposal: Proposal, u: Tensor, _: Tensor) -> Outcome:
    return accept_block(target_probs, proposal, u, u[:, 0])


def inverted_passes(x: Tokens, p: Model, q: Model) -> Dist:
    return [min(Fraction(1), q[x[:i]][token] / p[x[:i]][token]) for i, token in enumerate(x)]


def target_leftover(x: Tokens, n: int, p: Model, _: Model) -> Dist:
    return p[x[:n]]


def draft_leftover(x: Tokens, n: int, p: Model, q: Model) -> Dist:
    return q[x[:-1]] if n == len(x) else token_leftover(x, n, p, q)


WRONG = {
    "ratio inverted": Rule(inverted_ratio, inverted_passes, token_leftover),
    "residual forgotten": Rule(no_residual, token_passes, target_leftover),
    "bonus from draft": Rule(bonus_of_draft, token_passes, draft_leftover),
    "noise reused, token": Rule(token_shared, token_passes, token_leftover, shared_noise=True),
    "noise reused, block": Rule(block_shared, block_passes, block_leftover, shared_noise=True),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("k", [1, 2])
def test_wrong_rule_is_caught(name: str, k: int):
    rng = random.Random(k)
    p, q = random_model(3, k, rng), random_model(3, k, rng)
    result = integrate(WRONG[name], p, q, k)
    assert sum(result.emitted.values()) == 1
    assert not is_lossless(result, p, k)


@pytest.mark.parametrize("k", [2, 3])
def test_first_failure_block_is_caught(k: int):
    rng = random.Random(k)
    p, q = random_model(3, k, rng), random_model(3, k, rng)
    rule = Rule(first_failure_block, block_passes, block_leftover)
    assert not is_lossless(integrate(rule, p, q, k), p, k)
    # with one draft token there is nothing to stop before: the harness itself is not at fault
    assert is_lossless(integrate(rule, p, q, 1), p, 1)


# --- the rule is right, what it is told is not ------------------------------------------------


@pytest.mark.parametrize("rule", [TOKEN, BLOCK])
@pytest.mark.parametrize("k", [1, 2])
def test_other_filters_on_one_side_are_caught(rule: Rule, k: int):
    rng = random.Random(20 + k)
    raw_p, raw_q = random_model(3, k, rng), random_model(3, k, rng)
    p, q = sharpened(raw_p), sharpened(raw_q)  # what was asked for: temperature 1/2
    assert is_lossless(integrate(rule, p, q, k), p, k)
    draft_only = integrate(rule, raw_p, q, k)
    assert not is_lossless(draft_only, p, k), "the target's temperature was ignored"
    raw_logits_q = integrate(rule, p, raw_q, k, drafted_from=q)
    assert not is_lossless(raw_logits_q, p, k), "q was not what the draft was drawn from"
    # a draft at another temperature that says so costs acceptance, not exactness
    assert is_lossless(integrate(rule, p, raw_q, k), p, k)


@pytest.mark.parametrize("rule", [TOKEN, BLOCK])
def test_an_argmax_draft_with_its_softmax_for_q_is_caught(rule: Rule):
    """transformers 47932: drafts are argmax, what is handed over is a softmax."""
    rng = random.Random(8)
    p, q = random_model(3, 2, rng), random_model(3, 2, rng)
    assert is_lossless(integrate(rule, p, argmax(q), 2), p, 2)
    assert not is_lossless(integrate(rule, p, q, 2, drafted_from=argmax(q)), p, 2)


@pytest.mark.parametrize("rule", [TOKEN, BLOCK])
def test_untempered_probabilities_at_temperature_zero_are_caught(rule: Rule):
    """litgpt: the draft slightly prefers token 0, the target prefers 1 with 0 second."""
    p = same_everywhere([Fraction(2, 5), Fraction(3, 5)], 2)
    q = same_everywhere([Fraction(11, 20), Fraction(9, 20)], 2)
    assert is_lossless(integrate(rule, argmax(p), argmax(q), 2), argmax(p), 2)
    assert not is_lossless(integrate(rule, p, q, 2, drafted_from=argmax(q)), argmax(p), 2)


# --- two steps: what may be seen again ---------------------------------------------------------


def two_steps(rule: Rule, seen_again: bool) -> bool:
    """Say whether the first two tokens stay exact over two steps of two draft tokens each.

    When step one accepts nothing, step two decides position 1 again. seen_again: with the accept
    noise of position 1 that step one has already looked at.
    """
    k = 2
    p = same_everywhere(normalised([2, 1, 3]), k)
    q = same_everywhere(normalised([3, 2, 1]), k)
    drafts = list(product(range(3), repeat=k))
    inner = cells({h for x in drafts for h in rule.passes(x, p, q)})
    after = cells(
        {c for x in drafts for n in range(k + 1) for c in cuts(rule.leftover(x, n, p, q))}
    )
    steps = list(product(drafts, inner, inner, after))
    accept, then = [[a[0], b[0]] for _, a, b, _ in steps], [c[0] for *_, c in steps]
    result = call(rule.run, [x for x, *_ in steps], p, q, accept, then)
    outcomes = list(zip(result.num_accepted.tolist(), result.next_tokens.tolist(), strict=True))

    # what step two puts at its first position, given its first accept noise; context plays no part
    second: dict[tuple[float, Fraction], dict[int, Fraction]] = defaultdict(
        lambda: defaultdict(Fraction)
    )
    for (x, a, b, c), (n, y) in zip(steps, outcomes, strict=True):
        second[a][x[0] if n else y] += chain_prob(q, x) * b[1] * c[1]
    joint: dict[Tokens, Fraction] = defaultdict(Fraction)
    for (x, a, b, c), (n, y) in zip(steps, outcomes, strict=True):
        weight = chain_prob(q, x) * a[1] * b[1] * c[1]
        if n:
            joint[(*x[:n], y)[:2]] += weight
            continue
        for noise in [b] if seen_again else inner:
            share = Fraction(1) if seen_again else noise[1]
            for z, part in second[noise].items():
                joint[(y, z)] += weight * share * part
    return all(joint[pair] == chain_prob(p, pair) for pair in product(range(3), repeat=2))


def test_token_rule_may_see_noise_again():
    assert two_steps(TOKEN, seen_again=False)
    assert two_steps(TOKEN, seen_again=True)


def test_block_rule_must_not_see_noise_again():
    """It searched past the first failure, so what it rejected tells of the noise it looked at."""
    assert two_steps(BLOCK, seen_again=False)
    assert not two_steps(BLOCK, seen_again=True)
