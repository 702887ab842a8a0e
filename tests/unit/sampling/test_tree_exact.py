"""Tree rules are lossless: an identity of fractions, not a statistic; wrong rules fail it.

As in test_acceptance_exact: for a given tree a rule is piecewise constant in each noise variable,
so the package's own function is called once in every cell, at the midpoint, and weighs the cell's
exact length. Every draw of children without replacement is enumerated. What comes out, the joint
distribution of the first tokens, must equal the target's own.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import permutations, product

import pytest
import torch
from test_acceptance_exact import (
    TOKEN,
    Dist,
    Model,
    Result,
    Tokens,
    argmax,
    cells,
    chain_prob,
    cuts,
    integrate,
    is_lossless,
    normalised,
    random_model,
    same_everywhere,
    sharpened,
)
from torch import Tensor

from forerun.sampling import sample_from_probs
from forerun.sampling.tree import TreeOutcome, TreeProposal, accept_tree_probs, accept_tree_samples

Shape = tuple[int, ...]  # each drafted node's parent
Draw = Callable[[Shape, Model], Iterator[tuple[Tokens, Fraction]]]  # nodes' tokens, probability
Run = Callable[[Tensor, TreeProposal, Tensor, Tensor], TreeOutcome]
Judge = Callable[[Sequence, Sequence, Sequence[int]], tuple[list, list]]

CHAIN, PAIR, TRIPLE = (0,), (0, 0), (0, 0, 0)
FORK_LOW, FORK_HIGH, BUSH = (0, 1, 1), (0, 0, 1), (0, 0, 1, 1, 2)
BROAD_FIRST, COMB, DEEP = (0, 0, 0, 2, 2), (0, 0, 1, 1, 3), (0, 1, 2, 2)
SHAPES = [CHAIN, PAIR, TRIPLE, FORK_LOW, FORK_HIGH, BUSH, BROAD_FIRST, COMB, DEEP]


def path_to(shape: Shape, node: int) -> list[int]:
    return [] if node == 0 else [*path_to(shape, shape[node - 1]), node]


def context(shape: Shape, tokens: Tokens, node: int) -> Tokens:
    return tuple(tokens[n - 1] for n in path_to(shape, node))


def children_of(shape: Shape, node: int) -> list[int]:
    return [n for n, parent in enumerate(shape, start=1) if parent == node]


def first_chain(shape: Shape, node: int = 0) -> list[int]:
    children = children_of(shape, node)
    return [children[0], *first_chain(shape, children[0])] if children else []


def depth_of(shape: Shape) -> int:
    return max((len(path_to(shape, n)) for n in range(len(shape) + 1)), default=0)


# --- the rule in fractions or floats, and the mistakes that can be made in it ------------------


def judge(p: Sequence, q: Sequence, tokens: Sequence[int], mistake: str = "") -> tuple[list, list]:
    """Give each child's chance in its trial, and the weights of the next token after them all."""
    chances: list = []
    p, q = list(p), list(q)
    for trial, x in enumerate(tokens):
        if trial and mistake != "p not renormalised":
            p = [v / sum(p) for v in p]
        if trial and sum(q) and mistake != "q not renormalised":
            q = [v / sum(q) for v in q]
        if sum(q) == 0:
            q = [type(p[0])(i == x) for i in range(len(p))]
        chances.append(min(type(p[0])(1), p[x] / q[x]))
        if mistake == "ratio inverted" and p[x]:
            chances[-1] = min(type(p[0])(1), q[x] / p[x])
        residual = [max(a - b, type(p[0])(0)) for a, b in zip(p, q, strict=True)]
        if mistake == "rule of deterministic children":
            p = [v * (i != x) for i, v in enumerate(p)]
        elif mistake != "residual forgotten" and sum(residual):
            p = residual
        if mistake != "with replacement":
            q = [v * (i != x) for i, v in enumerate(q)]
    return chances, p


def slow_rule(
    target_probs: Tensor, proposal: TreeProposal, accept: Tensor, then: Tensor, mistake: str = ""
) -> TreeOutcome:
    """Slow twin of accept_tree_probs, one request and one node at a time."""
    target, weights, paths, start = target_probs.double().tolist(), [], [], 0
    drafts = torch.zeros(1) if proposal.probs is None else proposal.probs.double()
    u, q = accept.tolist(), drafts.tolist()
    for b, length in enumerate(proposal.lengths.tolist()):
        shape = tuple(proposal.parents[b, 1 : length + 1].tolist())
        tokens, at, path = proposal.tokens[b].tolist(), 0, []
        while True:
            p, children = target[start + at], children_of(shape, at)
            told = [0.0] * len(p) if proposal.probs is None else q[b][at]
            chances, left = judge(p, told, [tokens[n] for n in children], mistake)
            noise = u[b][len(path)] if children else []
            kept = [n for n, h, v in zip(children, chances, noise, strict=False) if v < h]
            if not kept:
                break
            at = kept[0]
            path.append(at)
        weights.append(left)
        paths.append(path)
        start += length + 1
    padded = [[*path, *[0] * (proposal.max_depth - len(path))] for path in paths]
    return TreeOutcome(
        torch.tensor(padded).reshape(len(paths), proposal.max_depth),
        torch.tensor([len(path) for path in paths]),
        sample_from_probs(torch.tensor(weights, dtype=torch.float64), then),
    )


# --- drawing trees -----------------------------------------------------------------------------


def siblings(q: Dist, count: int) -> Iterator[tuple[Tokens, Fraction]]:
    """Draw without replacement; where q is used up the tokens left follow in their order."""
    for order in permutations(range(len(q)), count):
        weight, left = Fraction(1), list(q)
        for x in order:
            total = sum(left)
            rest = [i for i in range(len(q)) if i not in order[: order.index(x)]]
            weight *= left[x] / total if total else Fraction(int(x == rest[0]))
            left[x] = Fraction(0)
        if weight:
            yield order, weight


def sampled(shape: Shape, q: Model) -> Iterator[tuple[Tokens, Fraction]]:
    """Draw a tree's tokens, node by node."""

    def grow(node: int, tokens: dict[int, int], weight: Fraction) -> Iterator:
        if node > len(shape):
            yield tuple(tokens[n] for n in range(1, node)), weight
            return
        children = children_of(shape, node)
        known = tuple(tokens[n] for n in path_to(shape, node))
        for order, part in siblings(q[known], len(children)) if children else [((), Fraction(1))]:
            yield from grow(
                node + 1, {**tokens, **dict(zip(children, order, strict=True))}, weight * part
            )

    yield from grow(0, {}, Fraction(1))


def with_replacement(shape: Shape, q: Model) -> Iterator[tuple[Tokens, Fraction]]:
    """Draw the root's children from q each; of equal ones the first stays."""
    for drawn in product(range(len(q[()])), repeat=len(shape)):
        weight = Fraction(1)
        for x in drawn:
            weight *= q[()][x]
        yield tuple(dict.fromkeys(drawn)), weight


def fixed(tokens: Tokens) -> Draw:
    return lambda _shape, _q: iter([(tokens, Fraction(1))])


# --- exact integration -------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A drawn tree with its noise: what one request of the batch is given."""

    shape: Shape
    tokens: Tokens
    accept: tuple[float, ...]  # D x C, flat
    then: float
    weight: Fraction


def call(run: Run, cases: list[Case], p: Model, q: Model | None, size: Shape) -> TreeOutcome:
    """Run a rule on all cases in one batch. size: D, C of the noise."""
    vocabulary = len(p[()])
    proposal = TreeProposal.from_lists([c.tokens for c in cases], [c.shape for c in cases])
    known = [[context(c.shape, c.tokens, n) for n in range(len(c.shape) + 1)] for c in cases]
    if q is not None:
        probs = torch.full((*proposal.tokens.shape, vocabulary), 7.0)  # padding is garbage
        for b, contexts in enumerate(known):
            for n, before in enumerate(contexts):
                if children_of(cases[b].shape, n):
                    probs[b, n] = torch.tensor([float(v) for v in q[before]])
        proposal = TreeProposal(proposal.tokens, proposal.parents, proposal.lengths, probs)
    rows = [[float(v) for v in p[before]] for contexts in known for before in contexts]
    noise = torch.tensor([c.accept for c in cases], dtype=torch.float64).reshape(-1, *size)
    then = torch.tensor([c.then for c in cases], dtype=torch.float64)
    return run(torch.tensor(rows), proposal, noise, then)


def integrate_tree(
    run: Run,
    p: Model,
    q: Model | None,
    shapes: Sequence[Shape],  # one of them at random, known before anything is drawn
    draw: Draw = sampled,
    drafted_from: Model | None = None,
    judge: Judge = judge,
    shared: str = "",  # noise used twice: for "siblings", or for "recovery"
) -> Result:
    """Integrate a rule over trees and noise. q: what it is told; drafted_from: the truth."""
    num_levels = max(map(depth_of, shapes))
    num_trials = max((shape.count(n) for shape in shapes for n in set(shape)), default=0)
    told = same_everywhere([Fraction(0)] * len(p[()]), num_levels) if q is None else q
    first: list[tuple[Case, dict[int, Dist]]] = []
    for shape in shapes:
        for tokens, weight in draw(shape, told if drafted_from is None else drafted_from):
            kept = shape[: len(tokens)]
            points: list[list[Fraction]] = [[] for _ in range(num_levels * num_trials)]
            left = {}
            for node in range(len(kept) + 1):
                before, depth = context(kept, tokens, node), len(path_to(kept, node))
                children = [tokens[n - 1] for n in children_of(kept, node)]
                chances, left[node] = judge(p[before], told[before], children)
                for trial, chance in enumerate(chances):
                    points[depth * num_trials + trial * (shared != "siblings")].append(chance)
            if shared == "recovery":
                points[0] += [cut for each in left.values() for cut in cuts(each)]
            for combination in product(*map(cells, points)):
                length = weight / len(shapes)
                for _, part in combination:
                    length *= part
                first.append(
                    (Case(kept, tokens, tuple(u for u, _ in combination), 0.5, length), left)
                )
    size = (num_levels, num_trials)
    paths = call(run, [case for case, _ in first], p, q, size).paths.tolist()

    second: list[Case] = []
    for (case, left), path in zip(first, paths, strict=True):
        points = [] if shared == "recovery" else cuts(left[max(path, default=0)])
        for then, part in cells(points):
            second.append(Case(case.shape, case.tokens, case.accept, then, case.weight * part))
    random.Random(1).shuffle(second)  # shapes side by side
    outcome = call(run, second, p, q, size)
    return collect(second, outcome)


def collect(cases: list[Case], outcome: TreeOutcome) -> Result:
    emitted: dict[Tokens, Fraction] = defaultdict(Fraction)
    mean = Fraction(0)
    for case, path, n, y in zip(
        cases,
        outcome.paths.tolist(),
        outcome.num_accepted.tolist(),
        outcome.next_tokens.tolist(),
        strict=True,
    ):
        assert path[n:] == [0] * (len(path) - n)
        assert path[:n] == (path_to(case.shape, path[n - 1]) if n else [])
        emitted[(*(case.tokens[node - 1] for node in path[:n]), y)] += case.weight
        mean += case.weight * n
    assert sum(emitted.values()) == 1
    return Result(dict(emitted), mean)


# p and q such that a first rejection leaves weight on two tokens, and of one of them less than the
# rest of q has: the second trial is neither certain nor hopeless, as it would be for most models
TELLING = [
    (same_everywhere(normalised(p), 1), same_everywhere(normalised(q), 1))
    for p, q in [([9, 5, 2, 2], [1, 4, 6, 7]), ([3, 8, 3, 2], [2, 2, 5, 7])]
]


# --- sampled children --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("low", [0, 1])
def test_sampled_tree_is_lossless(shape: Shape, low: int):
    rng = random.Random(10 * SHAPES.index(shape) + low)
    k = depth_of(shape)
    p, q = random_model(3, k, rng, low), random_model(3, k, rng, low)
    assert is_lossless(integrate_tree(accept_tree_probs, p, q, [shape]), p, k)


@pytest.mark.parametrize("shape", [PAIR, TRIPLE, FORK_LOW, FORK_HIGH], ids=str)
@pytest.mark.parametrize("low", [0, 1])
def test_sampled_tree_of_four_tokens_is_lossless(shape: Shape, low: int):
    rng = random.Random(40 * SHAPES.index(shape) + low)
    k = depth_of(shape)
    p, q = random_model(4, k, rng, low), random_model(4, k, rng, low)
    assert is_lossless(integrate_tree(accept_tree_probs, p, q, [shape]), p, k)


def test_a_ragged_batch_is_lossless():
    """Whether to draft nothing, a chain or a tree is decided before the draw."""
    rng = random.Random(5)
    p, q = random_model(3, 2, rng), random_model(3, 2, rng)
    shapes = [(), CHAIN, TRIPLE, FORK_HIGH, (0, 1)]
    assert is_lossless(integrate_tree(accept_tree_probs, p, q, shapes), p, 2)


def test_a_draft_like_the_target_is_accepted_whole_along_first_children():
    p = random_model(3, 2, random.Random(5))
    result = integrate_tree(accept_tree_probs, p, p, [FORK_LOW])
    assert result.mean_accepted == 2
    assert is_lossless(result, p, 2)


@pytest.mark.parametrize("shape", [PAIR, TRIPLE, BROAD_FIRST], ids=str)
def test_a_draft_that_is_used_up_goes_on_deterministically(shape: Shape):
    """Q is certain of its first token; the siblings that follow are not drawn."""
    rng = random.Random(6)
    k = depth_of(shape)
    p, q = random_model(3, k, rng), argmax(random_model(3, k, rng))
    result = integrate_tree(accept_tree_probs, p, q, [shape])
    assert is_lossless(result, p, k)
    if shape == TRIPLE:  # all the vocabulary: one of them is the target's
        assert result.mean_accepted == 1


@pytest.mark.parametrize("shape", [FORK_HIGH, FORK_LOW, BROAD_FIRST], ids=str)
def test_a_tree_never_accepts_less_than_its_first_chain(shape: Shape):
    rng = random.Random(7)
    k = depth_of(shape)
    gains = []
    for _ in range(2):
        p, q = random_model(3, k, rng), random_model(3, k, rng)
        tree = integrate_tree(accept_tree_probs, p, q, [shape]).mean_accepted
        chain = integrate(TOKEN, p, q, len(first_chain(shape))).mean_accepted
        gains.append(tree - chain)
    assert min(gains) >= 0
    assert max(gains) > Fraction(1, 50)


@pytest.mark.parametrize("shape", [PAIR, TRIPLE], ids=str)
def test_independent_draws_without_their_twins_are_draws_without_replacement(shape: Shape):
    """Whether there is another child depends on those before it alone: no anticipation."""
    for p, q in TELLING:
        result = integrate_tree(accept_tree_probs, p, q, [shape], with_replacement)
        assert is_lossless(result, p, 1)


def test_a_chain_accepts_what_the_token_rule_does():
    rng = random.Random(8)
    p, q = random_model(3, 2, rng), random_model(3, 2, rng)
    tree, chain = integrate_tree(accept_tree_probs, p, q, [(0, 1)]), integrate(TOKEN, p, q, 2)
    assert tree == chain


# --- deterministic children --------------------------------------------------------------------


def distinct_tokens(shape: Shape, size: int, rng: random.Random) -> Tokens:
    tokens: dict[int, int] = {}
    for node in range(len(shape) + 1):
        children = children_of(shape, node)
        tokens.update(zip(children, rng.sample(range(size), len(children)), strict=True))
    return tuple(tokens[n] for n in range(1, len(shape) + 1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [3, 4])
def test_deterministic_tree_is_lossless_by_trials(shape: Shape, size: int):
    rng = random.Random(10 * SHAPES.index(shape) + size)
    k = depth_of(shape)
    p, draw = random_model(size, k, rng), fixed(distinct_tokens(shape, size, rng))
    assert is_lossless(integrate_tree(accept_tree_probs, p, None, [shape], draw), p, k)


def integrate_samples(p: Model, shape: Shape, tokens: Tokens, one_noise: bool = False) -> Result:
    """Integrate the rule that walks along the target's samples; a depth's nodes share noise.

    one_noise: a mistake, the depths share it too.
    """
    k, num_nodes = depth_of(shape), len(shape) + 1
    before = [context(shape, tokens, node) for node in range(num_nodes)]
    points: list[list[Fraction]] = [[] for _ in range(k + 1)]
    for each in before:
        points[0 if one_noise else len(each)] += cuts(p[each])
    noise = list(product(*map(cells, points)))
    at = [[c[0 if one_noise else len(each)][0] for each in before] for c in noise]
    probs = torch.tensor([[float(v) for v in p[each]] for each in before]).repeat(len(noise), 1)
    samples = sample_from_probs(probs, torch.tensor(at, dtype=torch.float64).flatten())
    proposal = TreeProposal.from_lists([tokens] * len(noise), [shape] * len(noise))
    cases = []
    for combination in noise:
        length = Fraction(1)
        for _, part in combination:
            length *= part
        cases.append(Case(shape, tokens, (), 0.0, length))
    return collect(cases, accept_tree_samples(samples, proposal))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [3, 4])
def test_walk_along_samples_is_lossless(shape: Shape, size: int):
    rng = random.Random(100 * SHAPES.index(shape) + size)
    k = depth_of(shape)
    p = random_model(size, k, rng, low=0)
    tokens = distinct_tokens(shape, size, rng)
    result = integrate_samples(p, shape, tokens)
    assert is_lossless(result, p, k)
    reached = [context(shape, tokens, node) for node in range(1, len(shape) + 1)]
    assert result.mean_accepted == sum(chain_prob(p, each) for each in reached)


def test_both_rules_accept_as_much_of_a_deterministic_tree():
    rng = random.Random(9)
    p, tokens = random_model(3, 2, rng), distinct_tokens(BUSH, 3, rng)
    trials = integrate_tree(accept_tree_probs, p, None, [BUSH], fixed(tokens))
    assert trials == integrate_samples(p, BUSH, tokens)


# --- negative controls -------------------------------------------------------------------------

MISTAKES = [
    "q not renormalised",
    "p not renormalised",
    "with replacement",
    "residual forgotten",
    "ratio inverted",
    "rule of deterministic children",
]


@pytest.mark.parametrize("mistake", ["", *MISTAKES])
@pytest.mark.parametrize("shape", [PAIR, TRIPLE], ids=str)
def test_wrong_rule_is_caught(mistake: str, shape: Shape):
    run, told = partial(slow_rule, mistake=mistake), partial(judge, mistake=mistake)
    for p, q in TELLING[: 2 if shape == PAIR else 1]:
        result = integrate_tree(run, p, q, [shape], judge=told)
        assert is_lossless(result, p, 1) == (not mistake)


def test_the_slow_twin_and_the_package_give_the_same():
    rng = random.Random(21)
    p, q = random_model(3, 2, rng), random_model(3, 2, rng)
    quick = integrate_tree(accept_tree_probs, p, q, [FORK_HIGH, PAIR])
    assert quick == integrate_tree(slow_rule, p, q, [FORK_HIGH, PAIR])


def siblings_shared(target: Tensor, proposal: TreeProposal, u: Tensor, v: Tensor) -> TreeOutcome:
    return accept_tree_probs(target, proposal, u[..., :1].expand_as(u), v)


def recovery_shared(target: Tensor, proposal: TreeProposal, u: Tensor, _: Tensor) -> TreeOutcome:
    return accept_tree_probs(target, proposal, u, u[:, 0, 0])


@pytest.mark.parametrize(
    ("run", "shared"), [(siblings_shared, "siblings"), (recovery_shared, "recovery")]
)
@pytest.mark.parametrize("shape", [PAIR, TRIPLE], ids=str)
def test_noise_used_twice_is_caught(run: Run, shared: str, shape: Shape):
    for p, q in TELLING[: 2 if shape == PAIR else 1]:
        assert is_lossless(integrate_tree(accept_tree_probs, p, q, [shape]), p, 1)
        assert not is_lossless(integrate_tree(run, p, q, [shape], shared=shared), p, 1)


def test_one_noise_for_all_depths_is_caught():
    rng = random.Random(23)
    p, tokens = random_model(3, 2, rng), distinct_tokens(BUSH, 3, rng)
    assert is_lossless(integrate_samples(p, BUSH, tokens), p, 2)
    assert not is_lossless(integrate_samples(p, BUSH, tokens, one_noise=True), p, 2)


def test_children_sorted_after_the_draw_are_caught():
    """The order of trial is the order of the draw, not that of probabilities."""

    def falling(shape: Shape, q: Model) -> Iterator[tuple[Tokens, Fraction]]:
        for tokens, weight in sampled(shape, q):
            yield tuple(sorted(tokens, key=lambda x: -q[()][x])), weight

    rng = random.Random(25)
    p, q = random_model(3, 1, rng), random_model(3, 1, rng)
    assert is_lossless(integrate_tree(accept_tree_probs, p, q, [PAIR]), p, 1)
    assert not is_lossless(integrate_tree(accept_tree_probs, p, q, [PAIR], falling), p, 1)


def test_a_child_dropped_for_its_value_is_caught():
    """Anticipation: the second child is drawn and then left out if the draft doubts it."""

    def cut_off(shape: Shape, q: Model) -> Iterator[tuple[Tokens, Fraction]]:
        for tokens, weight in sampled(shape, q):
            yield tokens if q[()][tokens[1]] > Fraction(3, 20) else tokens[:1], weight

    p = same_everywhere(normalised([4, 4, 1, 1]), 1)
    q = same_everywhere(normalised([1, 2, 3, 4]), 1)
    assert is_lossless(integrate_tree(accept_tree_probs, p, q, [PAIR]), p, 1)
    assert not is_lossless(integrate_tree(accept_tree_probs, p, q, [PAIR], cut_off), p, 1)


def test_deterministic_children_with_a_softmax_for_q_are_caught():
    rng = random.Random(26)
    p, q = random_model(3, 1, rng), random_model(3, 1, rng)
    best = fixed(tuple(sorted(range(3), key=lambda x: -q[()][x])[:2]))
    assert is_lossless(integrate_tree(accept_tree_probs, p, None, [PAIR], best), p, 1)
    assert not is_lossless(integrate_tree(accept_tree_probs, p, q, [PAIR], best), p, 1)


def test_other_filters_on_one_side_are_caught():
    rng = random.Random(27)
    raw_p, raw_q = random_model(3, 1, rng), random_model(3, 1, rng)
    p, q = sharpened(raw_p), sharpened(raw_q)
    assert is_lossless(integrate_tree(accept_tree_probs, p, q, [PAIR]), p, 1)
    assert not is_lossless(integrate_tree(accept_tree_probs, raw_p, q, [PAIR]), p, 1)
    lied = integrate_tree(accept_tree_probs, p, raw_q, [PAIR], drafted_from=q)
    assert not is_lossless(lied, p, 1)
    assert is_lossless(integrate_tree(accept_tree_probs, p, raw_q, [PAIR]), p, 1)
