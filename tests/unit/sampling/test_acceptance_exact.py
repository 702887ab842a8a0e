"""Acceptance rules are lossless: an identity of fractions, not a statistic; wrong rules fail it.

The package's own functions are integrated exactly. For given drafts a rule is piecewise constant in
each noise variable, with breakpoints that follow from the rule's definition in fractions. So it is
called once in every cell, at the midpoint, and weighs the cell's exact length. What comes out, the
joint distribution of the first k + 1 tokens, must equal the target's own.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, product

import pytest
import torch
from torch import Tensor

from forerun.sampling import accept_block, accept_samples, accept_tokens, sample_from_probs
from forerun.types import Outcome, Proposal

Tokens = tuple[int, ...]
Dist = list[Fraction]
Model = dict[Tokens, Dist]  # the next token's distribution after each context
Run = Callable[[Tensor, Proposal, Tensor, Tensor], Outcome]


@dataclass(frozen=True)
class Rule:
    """A rule of the package (or a wrong one), and where its outcome changes."""

    run: Run
    passes: Callable[[Tokens, Model, Model], Dist]  # chance that each draft token's test passes
    leftover: Callable[[Tokens, int, Model, Model], Dist]  # what follows n accepted tokens
    shared_noise: bool = False  # the first accept noise also draws the next token


# --- the rules in fractions, from the papers -------------------------------------------------


def prefix_probs(x: Tokens, p: Model, q: Model) -> Dist:
    chain = [Fraction(1)]
    for i, token in enumerate(x):
        chain.append(min(Fraction(1), chain[-1] * p[x[:i]][token] / q[x[:i]][token]))
    return chain


def excess(scale: Fraction, p: Dist, q: Dist) -> Dist:
    return [max(scale * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]


def token_passes(x: Tokens, p: Model, q: Model) -> Dist:
    return [min(Fraction(1), p[x[:i]][token] / q[x[:i]][token]) for i, token in enumerate(x)]


def token_leftover(x: Tokens, n: int, p: Model, q: Model) -> Dist:
    return p[x] if n == len(x) else excess(Fraction(1), p[x[:n]], q[x[:n]])


def block_passes(x: Tokens, p: Model, q: Model) -> Dist:
    chain = prefix_probs(x, p, q)
    passes = []
    for i in range(1, len(x)):
        z = sum(excess(chain[i], p[x[:i]], q[x[:i]]))
        passes.append(Fraction(1) if chain[i] == 1 else z / (z + 1 - chain[i]))
    return [*passes, chain[-1]]


def block_leftover(x: Tokens, n: int, p: Model, q: Model) -> Dist:
    return p[x] if n == len(x) else excess(prefix_probs(x, p, q)[n], p[x[:n]], q[x[:n]])


TOKEN = Rule(accept_tokens, token_passes, token_leftover)
BLOCK = Rule(accept_block, block_passes, block_leftover)
RULES = [pytest.param(TOKEN, id="token"), pytest.param(BLOCK, id="block")]


# --- exact integration -----------------------------------------------------------------------


def cells(points: Iterable[Fraction]) -> list[tuple[float, Fraction]]:
    """Cut [0, 1) at the points: each cell's midpoint and length."""
    edges = sorted({Fraction(0), Fraction(1), *(point for point in points if 0 < point < 1)})
    found = [(float((a + b) / 2), b - a) for a, b in pairwise(edges)]
    # far above the rounding of float32, so a midpoint never falls on the wrong side
    assert min(length for _, length in found) > Fraction(1, 10**5)
    return found


def cuts(weights: Dist) -> list[Fraction]:
    total = sum(weights)
    return [part / total for part in accumulate(weights)] if total else []


def call(
    run: Run, drafts: list[Tokens], p: Model, q: Model, accept: list[list[float]], then: list[float]
) -> Outcome:
    """Run a rule on one request per draft, all in one batch."""
    k = len(drafts[0])
    target = [[float(v) for v in p[x[:i]]] for x in drafts for i in range(k + 1)]
    draft = [[[float(v) for v in q[x[:i]]] for i in range(k)] for x in drafts]
    proposal = Proposal(
        torch.tensor(drafts, dtype=torch.int64).reshape(len(drafts), k),
        torch.full((len(drafts),), k),
        torch.tensor(draft, dtype=torch.float32),
    )
    noise = torch.tensor(accept, dtype=torch.float64).reshape(len(drafts), k)
    return run(torch.tensor(target), proposal, noise, torch.tensor(then, dtype=torch.float64))


@dataclass(frozen=True)
class Result:
    emitted: dict[Tokens, Fraction]  # accepted tokens and the next one
    mean_accepted: Fraction


def integrate(rule: Rule, p: Model, q: Model, k: int, drafted_from: Model | None = None) -> Result:
    """Integrate a rule over drafts and noise. q: what the rule is told; drafted_from: the truth."""
    truth = q if drafted_from is None else drafted_from
    size = len(p[()])
    first: list[tuple[Tokens, list[float], Fraction]] = []
    for x in product(range(size), repeat=k):
        weight = chain_prob(truth, x)
        if weight == 0:
            continue
        points: list[list[Fraction]] = [[h] for h in rule.passes(x, p, q)]
        if rule.shared_noise:
            points[0] += [c for n in range(k + 1) for c in cuts(rule.leftover(x, n, p, q))]
        for combination in product(*(cells(each) for each in points)):
            length = weight
            for _, part in combination:
                length *= part
            first.append((x, [u for u, _ in combination], length))
    drafts, noise = [x for x, _, _ in first], [u for _, u, _ in first]
    counts = call(rule.run, drafts, p, q, noise, [0.5] * len(first)).num_accepted.tolist()

    second: list[tuple[Tokens, list[float], float, Fraction]] = []
    for (x, u, length), n in zip(first, counts, strict=True):
        points_after = [] if rule.shared_noise else cuts(rule.leftover(x, n, p, q))
        second += [(x, u, v, length * part) for v, part in cells(points_after)]
    outcome = call(
        rule.run, [s[0] for s in second], p, q, [s[1] for s in second], [s[2] for s in second]
    )
    emitted: dict[Tokens, Fraction] = defaultdict(Fraction)
    mean = Fraction(0)
    for (x, _, _, length), n, y in zip(
        second, outcome.num_accepted.tolist(), outcome.next_tokens.tolist(), strict=True
    ):
        emitted[(*x[:n], y)] += length
        mean += length * n
    return Result(dict(emitted), mean)


def chain_prob(model: Model, x: Tokens) -> Fraction:
    weight = Fraction(1)
    for i, token in enumerate(x):
        weight *= model[x[:i]][token]
    return weight


def is_lossless(result: Result, target: Model, k: int) -> bool:
    """Complete what was emitted with the target, and compare with the target's own k + 1 tokens."""
    size = len(target[()])
    joint: dict[Tokens, Fraction] = defaultdict(Fraction)
    for start, weight in result.emitted.items():
        for rest in product(range(size), repeat=k + 1 - len(start)):
            full = (*start, *rest)
            tail = Fraction(1)
            for i in range(len(start), k + 1):
                tail *= target[full[:i]][full[i]]
            joint[full] += weight * tail
    return all(
        joint[full] == chain_prob(target, full) for full in product(range(size), repeat=k + 1)
    )


# --- models ----------------------------------------------------------------------------------


def contexts(size: int, depth: int) -> Iterator[Tokens]:
    for length in range(depth + 1):
        yield from product(range(size), repeat=length)


def normalised(weights: Iterable[int | Fraction]) -> Dist:
    values = [Fraction(w) for w in weights]
    return [w / sum(values) for w in values]


def random_model(size: int, depth: int, rng: random.Random, low: int = 1) -> Model:
    """Draw integer weights up to 9; with low = 0 some tokens have probability 0."""
    return {
        c: normalised([rng.randint(low, 9) for _ in range(size - 1)] + [rng.randint(1, 9)])
        for c in contexts(size, depth)
    }


def sharpened(model: Model, power: int = 2) -> Model:
    """The same model at temperature 1 / power."""
    return {c: normalised(v**power for v in dist) for c, dist in model.items()}


def argmax(model: Model) -> Model:
    return {
        c: [Fraction(int(i == d.index(max(d)))) for i in range(len(d))] for c, d in model.items()
    }


def same_everywhere(dist: Dist, depth: int) -> Model:
    return {context: dist for context in contexts(len(dist), depth)}


# --- the rules are lossless ------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("size", "k"), [(2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (3, 3)])
@pytest.mark.parametrize("low", [0, 1])
def test_rule_is_lossless(rule: Rule, size: int, k: int, low: int):
    rng = random.Random(100 * size + 10 * k + low)
    for _ in range(3):
        p, q = random_model(size, k, rng, low), random_model(size, k, rng, low)
        assert is_lossless(integrate(rule, p, q, k), p, k)


@pytest.mark.parametrize("rule", RULES)
def test_rule_is_lossless_with_four_drafts_of_three_tokens(rule: Rule):
    rng = random.Random(34)
    p, q = random_model(3, 4, rng), random_model(3, 4, rng)
    assert is_lossless(integrate(rule, p, q, 4), p, 4)


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_like_the_target_is_accepted_whole(rule: Rule):
    p = random_model(3, 3, random.Random(5))
    result = integrate(rule, p, p, 3)
    assert result.mean_accepted == 3
    assert is_lossless(result, p, 3)


@pytest.mark.parametrize("rule", RULES)
def test_one_hot_drafts_give_both_rules_the_same(rule: Rule):
    rng = random.Random(6)
    p, q = random_model(3, 3, rng), argmax(random_model(3, 3, rng))
    result = integrate(rule, p, q, 3)
    assert is_lossless(result, p, 3)
    x = next(x for x in product(range(3), repeat=3) if chain_prob(q, x) == 1)
    assert result.mean_accepted == sum(chain_prob(p, x[:i]) for i in (1, 2, 3))


@pytest.mark.parametrize(
    ("k", "token", "block"),
    [
        (1, Fraction(2, 3), Fraction(2, 3)),
        (2, Fraction(10, 9), Fraction(11, 9)),
        (3, Fraction(38, 27), Fraction(5, 3)),
        (4, Fraction(130, 81), Fraction(166, 81)),
    ],
)
def test_expected_accepted_tokens_are_the_papers(k: int, token: Fraction, block: Fraction):
    p = same_everywhere([Fraction(1, 3), Fraction(2, 3)], k)
    q = same_everywhere([Fraction(2, 3), Fraction(1, 3)], k)
    assert integrate(TOKEN, p, q, k).mean_accepted == token
    assert integrate(BLOCK, p, q, k).mean_accepted == block


def test_block_never_accepts_less_than_token():
    rng = random.Random(7)
    for _ in range(10):
        p, q = random_model(3, 2, rng), random_model(3, 2, rng)
        assert integrate(BLOCK, p, q, 2).mean_accepted >= integrate(TOKEN, p, q, 2).mean_accepted


# --- point mass ------------------------------------------------------------------------------


def point_mass(p: Model, x: Tokens) -> Result:
    """Integrate the rule that the engine uses for deterministic drafts, with its own sampler."""
    k = len(x)
    rows = [p[x[:i]] for i in range(k + 1)]
    noise = list(product(*(cells(cuts(row)) for row in rows)))
    flat = torch.tensor([u for combination in noise for u, _ in combination], dtype=torch.float64)
    probs = torch.tensor([[float(v) for v in row] for row in rows]).repeat(len(noise), 1)
    samples = sample_from_probs(probs, flat)
    outcome = accept_samples(samples, Proposal.from_lists([list(x)] * len(noise)))
    emitted: dict[Tokens, Fraction] = defaultdict(Fraction)
    mean = Fraction(0)
    for combination, n, y in zip(
        noise, outcome.num_accepted.tolist(), outcome.next_tokens.tolist(), strict=True
    ):
        length = Fraction(1)
        for _, part in combination:
            length *= part
        emitted[(*x[:n], y)] += length
        mean += length * n
    return Result(dict(emitted), mean)


@pytest.mark.parametrize(("size", "k"), [(2, 1), (2, 4), (3, 1), (3, 2), (3, 3), (3, 4)])
def test_point_mass_is_lossless(size: int, k: int):
    rng = random.Random(size + 10 * k)
    p = random_model(size, k, rng, low=0)
    for x in rng.sample(list(product(range(size), repeat=k)), k=2):
        result = point_mass(p, x)
        assert is_lossless(result, p, k)
        assert result.mean_accepted == sum(chain_prob(p, x[:i]) for i in range(1, k + 1))
