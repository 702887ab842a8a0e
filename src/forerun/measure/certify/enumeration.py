"""The rules in use, enumerated exactly: every draft, every cell of noise, fractions throughout.

For given drafts a rule is piecewise constant in each noise variable, with breakpoints that follow
from its definition. So the package's own function is called once in every cell, at the midpoint,
and weighs the cell's exact length. The joint distribution of the first k + 1 tokens, completed with
the target after what was emitted, must equal the target's own: an identity, not a statistic.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, product

import torch

from ...params import SamplingParams
from ...sampling import RULES, FilterParams, Noise, Rule
from ...types import Outcome, Proposal
from .wrong import WRONG_RULES

__all__ = ["RuleCheck", "check_rule", "check_wrong_rules"]

Tokens = tuple[int, ...]
Dist = list[Fraction]
Model = dict[Tokens, Dist]  # the next token's distribution after each context
# vocabulary, drafts, models of that size
SIZES: Mapping[str, Sequence[tuple[int, int, int]]] = {
    "quick": ((2, 1, 4), (2, 2, 4), (2, 3, 2), (3, 1, 4), (3, 2, 3)),
    "full": ((2, 1, 8), (2, 2, 8), (2, 3, 6), (2, 4, 3), (3, 1, 8), (3, 2, 6), (3, 3, 1)),
}
CONTROL_SIZES = ((3, 2, 2),)
# The wrong rules that differ from a right one in a way that this enumeration can express.
ENUMERATED = {"inverted_ratio": "inverted", "residual_forgotten": "token",
              "bonus_from_draft": "token", "block_stops_early": "block"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RuleCheck:
    """What enumeration found of one rule."""

    rule: str
    num_models: int
    num_cells: int
    largest_error: Fraction  # of any outcome's probability

    @property
    def exact(self) -> bool:
        return self.largest_error == 0


def check_rule(name: str, size: str) -> RuleCheck:
    """Enumerate a rule of the package; `size` is quick or full."""
    return _check(name, RULES[name], _SHAPES[name], SIZES[size])


def check_wrong_rules(size: str) -> dict[str, RuleCheck]:
    """Enumerate the wrong rules; each must turn out not to be exact."""
    return {
        name: _check(name, WRONG_RULES[name][0], _SHAPES[shape], CONTROL_SIZES)
        for name, shape in ENUMERATED.items()
    }


# --- where rules change their mind, from the papers -------------------------------------------

Passes = Callable[[Tokens, Model, Model], Dist]  # the chance that each draft token's test passes
Leftover = Callable[[Tokens, int, Model, Model], Dist]  # what may follow n accepted tokens
Shape = tuple[Passes, Leftover]


def _chain(x: Tokens, p: Model, q: Model) -> Dist:
    chain = [Fraction(1)]
    for i, token in enumerate(x):
        chain.append(min(Fraction(1), chain[-1] * p[x[:i]][token] / q[x[:i]][token]))
    return chain


def _excess(scale: Fraction, p: Dist, q: Dist) -> Dist:
    return [max(scale * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]


def _token_passes(x: Tokens, p: Model, q: Model) -> Dist:
    return [min(Fraction(1), p[x[:i]][token] / q[x[:i]][token]) for i, token in enumerate(x)]


def _inverted_passes(x: Tokens, p: Model, q: Model) -> Dist:
    return [min(Fraction(1), q[x[:i]][token] / p[x[:i]][token]) for i, token in enumerate(x)]


def _token_leftover(x: Tokens, n: int, p: Model, q: Model) -> Dist:
    return p[x] if n == len(x) else _excess(Fraction(1), p[x[:n]], q[x[:n]])


def _block_passes(x: Tokens, p: Model, q: Model) -> Dist:
    chain = _chain(x, p, q)
    passes = []
    for i in range(1, len(x)):
        z = sum(_excess(chain[i], p[x[:i]], q[x[:i]]), Fraction(0))
        passes.append(Fraction(1) if chain[i] == 1 else z / (z + 1 - chain[i]))
    return [*passes, chain[-1]]


def _block_leftover(x: Tokens, n: int, p: Model, q: Model) -> Dist:
    return p[x] if n == len(x) else _excess(_chain(x, p, q)[n], p[x[:n]], q[x[:n]])


_SHAPES: Mapping[str, Shape | None] = {
    "point_mass": None,  # its noise is the target's own, one for each row
    "token": (_token_passes, _token_leftover),
    "block": (_block_passes, _block_leftover),
    "inverted": (_inverted_passes, _token_leftover),
}


# --- exact integration --------------------------------------------------------------------------


def _check(
    name: str, rule: Rule, shape: Shape | None, sizes: Iterable[tuple[int, int, int]]
) -> RuleCheck:
    largest, num_models, num_cells = Fraction(0), 0, 0
    for vocabulary, k, count in sizes:
        dice = random.Random(1000 * vocabulary + k)
        for index in range(count):
            p = _random_model(vocabulary, k, dice, low=index % 2 if shape is None else 1)
            q = _random_model(vocabulary, k, dice, low=1)
            if shape is None:
                emitted, cells = _integrate_point_mass(rule, p, k, dice)
            else:
                emitted, cells = _integrate(rule, shape, p, q, k)
            largest = max(largest, _error(emitted, p, k))
            num_models, num_cells = num_models + 1, num_cells + cells
    return RuleCheck(name, num_models, num_cells, largest)


def _integrate(
    rule: Rule, shape: Shape, p: Model, q: Model, k: int
) -> tuple[dict[Tokens, Fraction], int]:
    """Integrate over drafts from q, accept noise, then recover noise."""
    passes, leftover = shape
    size = len(p[()])
    first: list[tuple[Tokens, list[float], Fraction]] = []
    for x in product(range(size), repeat=k):
        for combination in product(*(_cells([h]) for h in passes(x, p, q))):
            length = _probability(q, x)
            for _, part in combination:
                length *= part
            first.append((x, [u for u, _ in combination], length))
    counts = _call(rule, first, [0.5] * len(first), p, q).num_accepted.tolist()
    second: list[tuple[Tokens, list[float], Fraction]] = []
    then: list[float] = []
    for (x, u, length), n in zip(first, counts, strict=True):
        # both what may rightly follow and the target, from which wrong rules may draw
        points = [*_cuts(leftover(x, n, p, q)), *_cuts(p[x[:n]]), *_cuts(q[x[: max(0, n - 1)]])]
        for v, part in _cells(points):
            second.append((x, u, length * part))
            then.append(v)
    outcome = _call(rule, second, then, p, q)
    emitted: dict[Tokens, Fraction] = defaultdict(Fraction)
    pairs = zip(second, outcome.num_accepted.tolist(), outcome.next_tokens.tolist(), strict=True)
    for (x, _, length), n, y in pairs:
        emitted[(*x[:n], y)] += length
    return dict(emitted), len(second)


def _call(
    rule: Rule,
    cases: Sequence[tuple[Tokens, list[float], Fraction]],
    then: Sequence[float],
    p: Model,
    q: Model,
) -> Outcome:
    """Run a rule on all cases in one batch; logits are logarithms, so filters are in play."""
    drafts = [x for x, _, _ in cases]
    k = len(drafts[0])
    logits = torch.tensor([[float(v) for v in p[x[:i]]] for x in drafts for i in range(k + 1)])
    proposal = Proposal(
        torch.tensor(drafts, dtype=torch.int64),
        torch.full((len(drafts),), k),
        torch.tensor([[[float(v) for v in q[x[:i]]] for i in range(k)] for x in drafts]),
    )
    noise = Noise(
        target=torch.zeros(len(logits), dtype=torch.float64),
        accept=torch.tensor([u for _, u, _ in cases], dtype=torch.float64),
        recover=torch.tensor(then, dtype=torch.float64),
    )
    return rule(logits.log(), _no_filters(len(logits)), proposal, noise)


def _integrate_point_mass(
    rule: Rule, p: Model, k: int, dice: random.Random
) -> tuple[dict[Tokens, Fraction], int]:
    """Integrate over the target's own noise in every row, for one deterministic draft."""
    x = tuple(dice.randrange(len(p[()])) for _ in range(k))
    rows = [p[x[:i]] for i in range(k + 1)]
    cases = list(product(*(_cells(_cuts(row)) for row in rows)))
    logits = torch.tensor([[float(v) for v in row] for row in rows]).log().repeat(len(cases), 1)
    noise = Noise(
        target=torch.tensor([u for case in cases for u, _ in case], dtype=torch.float64),
        accept=torch.zeros((len(cases), k), dtype=torch.float64),
        recover=torch.zeros(len(cases), dtype=torch.float64),
    )
    proposal = Proposal.from_lists([x] * len(cases))
    outcome = rule(logits, _no_filters(len(logits)), proposal, noise)
    emitted: dict[Tokens, Fraction] = defaultdict(Fraction)
    pairs = zip(cases, outcome.num_accepted.tolist(), outcome.next_tokens.tolist(), strict=True)
    for case, n, y in pairs:
        length = Fraction(1)
        for _, part in case:
            length *= part
        emitted[(*x[:n], y)] += length
    return dict(emitted), len(cases)


def _error(emitted: Mapping[Tokens, Fraction], target: Model, k: int) -> Fraction:
    """Complete what was emitted with the target, and compare the first k + 1 tokens."""
    size = len(target[()])
    joint: dict[Tokens, Fraction] = defaultdict(Fraction)
    for start, weight in emitted.items():
        for rest in product(range(size), repeat=k + 1 - len(start)):
            whole = (*start, *rest)
            tail = Fraction(1)
            for i in range(len(start), k + 1):
                tail *= target[whole[:i]][whole[i]]
            joint[whole] += weight * tail
    every = product(range(size), repeat=k + 1)
    return max(abs(joint[whole] - _probability(target, whole)) for whole in every)


def _cells(points: Iterable[Fraction]) -> list[tuple[float, Fraction]]:
    """Cut [0, 1) at the points: each cell's midpoint and length."""
    edges = sorted({Fraction(0), Fraction(1), *(point for point in points if 0 < point < 1)})
    return [(float((a + b) / 2), b - a) for a, b in pairwise(edges)]


def _cuts(weights: Dist) -> list[Fraction]:
    total = sum(weights)
    return [part / total for part in accumulate(weights)] if total else []


def _probability(model: Model, x: Tokens) -> Fraction:
    weight = Fraction(1)
    for i, token in enumerate(x):
        weight *= model[x[:i]][token]
    return weight


def _random_model(size: int, depth: int, dice: random.Random, low: int) -> Model:
    """Draw whole weights up to 9; with low = 0 some tokens have probability 0."""

    def contexts() -> Iterator[Tokens]:
        for length in range(depth + 1):
            yield from product(range(size), repeat=length)

    model = {}
    for context in contexts():
        weights = [*(dice.randint(low, 9) for _ in range(size - 1)), dice.randint(1, 9)]
        model[context] = [Fraction(weight, sum(weights)) for weight in weights]
    return model


def _no_filters(num_rows: int) -> FilterParams:
    return FilterParams.from_params([SamplingParams()] * num_rows)
