"""Exact enumeration: the rules in use, called in every cell of their noise, as fractions.

For given drafts a rule is piecewise constant in each noise variable. Where it changes follows from
the papers, in fractions; between two such points one call tells what happens with the cell's exact
length. Summed up, the joint distribution of the first k + 1 tokens must equal the target's.

Rules are called as the engine calls them, from logits and filters on, in ragged batches. Cells are
probed MARGIN from one of their ends, so a rule that changes further than that from where it should
is found out. Letters: p target, q draft, x drafted tokens, k how many, n accepted ones.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, product

import torch

from ...params import SamplingParams
from ...sampling import RULES, FilterParams, Noise, Rule, filtered_probs
from ...types import Outcome, Proposal
from .wrong import WRONG_RULES

__all__ = ["RuleCheck", "check_rule", "check_wrong_rules"]

SIZES = [(size, length) for size in (2, 3) for length in (1, 2, 3, 4)]  # vocabulary, draft tokens
CONTROL_SIZES = [(3, 1), (3, 2), (3, 3)]
NUM_ROUNDS = {"quick": 4, "full": 40}
MAX_WEIGHT = 9  # of a token in a random model
MARGIN = 2.0**-14  # far above the rounding of float32
SHORTEST = Fraction(1, 2**13)  # a model with a shorter cell is not taken
TEMPERATURE = 2.0  # of every request, so that a rule must mind it

Tokens = tuple[int, ...]
Dist = list[Fraction]
Model = Mapping[Tokens, Dist]  # the next token's distribution after each context
Edges = list[Fraction]  # 0, ..., 1: where a rule's outcome may change


@dataclass(frozen=True, slots=True)
class RuleCheck:
    """What enumeration found out about one rule."""

    rule: str
    num_models: int  # random pairs of a target and a draft
    num_cells: int
    exact: bool
    largest_error: Fraction  # of the probability of k + 1 tokens, over all models


def check_rule(name: str, effort: str) -> RuleCheck:
    """Check a rule of the package; `effort` is quick or full."""
    rng = random.Random(f"{name} {effort}")
    # point mass is the rule for deterministic drafts; the others take both kinds
    kinds = [False] if name == "point_mass" else [False, True]
    ways = [(*size, low, kind) for size in SIZES for low in (0, 1) for kind in kinds]
    checks = []
    for _ in range(NUM_ROUNDS[effort]):
        cases = [_random_case(*way, _SHAPES[name], rng) for way in ways]
        checks.append(_check(name, RULES[name], cases, rng))
    return RuleCheck(
        name,
        sum(each.num_models for each in checks),
        sum(each.num_cells for each in checks),
        all(each.exact for each in checks),
        max(each.largest_error for each in checks),
    )


def check_wrong_rules(effort: str) -> dict[str, RuleCheck]:
    """Check the wrong rules, on sampled drafts. None may come out exact."""
    rounds, checks = NUM_ROUNDS[effort] // 4, {}
    for name, (rule, _) in WRONG_RULES.items():
        rng = random.Random(f"{name} {effort}")
        sizes = CONTROL_SIZES * rounds
        cases = [_random_case(*size, 1, True, _SHAPES[name], rng) for size in sizes]
        checks[name] = _check(name, rule, cases, rng)
    return checks


# --- where rules change, from the papers -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where a rule's outcome changes."""

    accept: Callable[[Tokens, Model, Model], list[Dist]]  # in the noise of each draft token
    # in the recover noise after a prefix of x, at the running sums of these weights; last: n = k
    recover: Callable[[Tokens, bool, Model, Model], Dist]
    samples: bool = False  # in the target noise, at the running sums of p


def _ratios(x: Tokens, p: Model, q: Model) -> Dist:
    return [p[x[:i]][token] / q[x[:i]][token] for i, token in enumerate(x)]


def _excess(share: Fraction, p: Dist, q: Dist) -> Dist:
    return [max(share * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]


def _chain(x: Tokens, p: Model, q: Model) -> Dist:
    """p_0 = 1, p_i = min(1, p_(i-1) * P_t(x_i) / P_d(x_i))."""
    clamped: Callable[[Fraction, Fraction], Fraction] = lambda a, r: min(Fraction(1), a * r)  # noqa: E731
    return list(accumulate(_ratios(x, p, q), clamped, initial=Fraction(1)))


def _token_accept(x: Tokens, p: Model, q: Model) -> list[Dist]:
    return [[ratio] for ratio in _ratios(x, p, q)]


def _token_recover(x: Tokens, last: bool, p: Model, q: Model) -> Dist:
    return p[x] if last else _excess(Fraction(1), p[x], q[x])


def _block_accept(x: Tokens, p: Model, q: Model) -> list[Dist]:
    chain = _chain(x, p, q)
    passes = [[chain[-1]]]
    for i in reversed(range(1, len(x))):
        z = sum(_excess(chain[i], p[x[:i]], q[x[:i]]))
        passes.insert(0, [Fraction(1) if chain[i] == 1 else z / (z + 1 - chain[i])])
    return passes


def _block_recover(x: Tokens, last: bool, p: Model, q: Model) -> Dist:
    return p[x] if last else _excess(_chain(x, p, q)[-1], p[x], q[x])


def _reused_accept(x: Tokens, p: Model, q: Model) -> list[Dist]:
    residuals = [_excess(Fraction(1), p[x[:i]], q[x[:i]]) for i in range(len(x))]
    return [[r, *_edges(w)] for r, w in zip(_ratios(x, p, q), residuals, strict=True)]


def _at_temperature_1(p: Model, x: Tokens) -> Model:
    """Undo TEMPERATURE along x: probabilities to the power of 2."""
    prefixes = [x[:i] for i in range(len(x) + 1)]
    return {c: _normalised([value**2 for value in p[c]]) for c in prefixes}


_SHAPES: Mapping[str, _Shape] = {
    "point_mass": _Shape(lambda x, p, q: [[] for _ in x], lambda *_: [], samples=True),
    "token": _Shape(_token_accept, _token_recover),
    "block": _Shape(_block_accept, _block_recover),
    "inverted_ratio": _Shape(
        lambda x, p, q: [[1 / ratio] for ratio in _ratios(x, p, q)], _token_recover
    ),
    "residual_forgotten": _Shape(_token_accept, lambda x, last, p, q: p[x]),
    "noise_reused": _Shape(_reused_accept, lambda x, last, p, q: p[x] if last else []),
    "bonus_from_draft": _Shape(
        _token_accept,
        lambda x, last, p, q: q[x[:-1]] if last else _token_recover(x, last, p, q),
    ),
    "temperature_ignored": _Shape(
        lambda x, p, q: _token_accept(x, _at_temperature_1(p, x), q),
        lambda x, last, p, q: _token_recover(x, last, _at_temperature_1(p, x), q),
    ),
    "block_stops_early": _Shape(_block_accept, _block_recover),
}


# --- random models ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Case:
    """A target, the drafts that meet it, and the cells of their noise."""

    size: int
    length: int
    p: Model
    q: Model
    sampled: bool
    drafts: Mapping[Tokens, Fraction]  # with their chances, which add up to 1
    accept: Mapping[Tokens, list[Edges]]  # by draft
    target: Mapping[Tokens, Edges]  # by context
    recover: Mapping[Tokens, Edges]  # by accepted tokens


def _random_case(
    size: int, length: int, low: int, sampled: bool, shape: _Shape, rng: random.Random
) -> _Case:
    """Draw models of small whole weights, from `low` up, until no cell is too short to probe."""
    contexts = [c for n in range(length + 1) for c in product(range(size), repeat=n)]
    while True:
        p = {c: _random_dist(size, low, rng) for c in contexts}
        q = {c: _random_dist(size, low, rng) for c in contexts}
        drafts = {x: _chance(q, x) for x in product(range(size), repeat=length)}
        if not sampled:
            x = rng.choice(list(drafts))
            drafts = {x: Fraction(1)}
            q = {x[:i]: [Fraction(int(v == x[i])) for v in range(size)] for i in range(length)}
        drafts = {x: chance for x, chance in drafts.items() if chance > 0}
        if any(p[c] == q[c] for x in drafts for c in (x[:i] for i in range(length))):
            continue  # there rounding decides whether anything is left over
        accept = {x: [_cut(points) for points in shape.accept(x, p, q)] for x in drafts}
        prefixes = {x[:n] for x in drafts for n in range(length + 1)}
        target = {c: _edges(p[c]) if shape.samples else _edges([]) for c in prefixes}
        recover = {c: _edges(shape.recover(c, len(c) == length, p, q)) for c in prefixes}
        edges = [
            *target.values(),
            *recover.values(),
            *(e for each in accept.values() for e in each),
        ]
        if all(b - a >= SHORTEST for each in edges for a, b in pairwise(each)):
            return _Case(size, length, p, q, sampled, drafts, accept, target, recover)


def _random_dist(size: int, low: int, rng: random.Random) -> Dist:
    weights = [rng.randint(low, MAX_WEIGHT) for _ in range(size - 1)]
    return _normalised([*weights, rng.randint(1, MAX_WEIGHT)])


def _normalised(weights: Sequence[int | Fraction]) -> Dist:
    return [Fraction(weight) / sum(weights) for weight in weights]


def _chance(model: Model, x: Tokens) -> Fraction:
    return math.prod((model[x[:i]][token] for i, token in enumerate(x)), start=Fraction(1))


def _edges(weights: Dist) -> Edges:
    """Where a draw by these weights changes."""
    total = sum(weights)
    return _cut([part / total for part in accumulate(weights)] if total else [])


def _cut(points: Iterable[Fraction]) -> Edges:
    return sorted({Fraction(0), Fraction(1), *(point for point in points if 0 < point < 1)})


# --- integration -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cell:
    """A box in the noise of a request with given drafts, and the point where it is probed."""

    case: int
    draft: Tokens
    weight: Fraction  # the chance of the draft, times the box's volume
    accept: list[float]  # one for each draft token
    target: list[float]  # one more
    recover: float


def _check(name: str, rule: Rule, cases: Sequence[_Case], rng: random.Random) -> RuleCheck:
    """Integrate a rule over drafts and noise of all cases, in two calls for each kind of draft."""
    emitted: list[dict[Tokens, Fraction]] = [defaultdict(Fraction) for _ in cases]
    num_cells = 0
    for kind in {case.sampled for case in cases}:
        boxes = [box for i, case in enumerate(cases) if case.sampled == kind
                 for box in _boxes(i, case, rng)]  # fmt: skip
        # how the recover noise is cut depends on how many tokens are accepted, not the reverse
        counts = _call(rule, cases, boxes, kind).num_accepted.tolist()
        cells = [
            _Cell(box.case, box.draft, box.weight * length, box.accept, box.target, at)
            for box, n in zip(boxes, counts, strict=True)
            for at, length in _probes(cases[box.case].recover[box.draft[:n]], rng)
        ]
        outcome = _call(rule, cases, cells, kind)
        pairs = zip(outcome.num_accepted.tolist(), outcome.next_tokens.tolist(), strict=True)
        for cell, (n, token) in zip(cells, pairs, strict=True):
            emitted[cell.case][(*cell.draft[:n], token)] += cell.weight
        num_cells += len(cells)
    error = max(_largest_error(case, each) for case, each in zip(cases, emitted, strict=True))
    return RuleCheck(name, len(cases), num_cells, error == 0, error)


def _probes(edges: Edges, rng: random.Random) -> list[tuple[float, Fraction]]:
    """Choose a point in each cell, next to one of its ends."""
    return [
        (float(a) + MARGIN if rng.random() < 0.5 else float(b) - MARGIN, b - a)
        for a, b in pairwise(edges)
    ]


def _boxes(index: int, case: _Case, rng: random.Random) -> Iterator[_Cell]:
    """Cut the noise of all drafts of a case, except for the recover noise."""
    for x, chance in case.drafts.items():
        axes = [*case.accept[x], *(case.target[x[:i]] for i in range(case.length + 1))]
        for point in product(*(_probes(edges, rng) for edges in axes)):
            weight = math.prod((length for _, length in point), start=chance)
            at = [position for position, _ in point]
            yield _Cell(index, x, weight, at[: case.length], at[case.length :], 0.5)


def _call(rule: Rule, cases: Sequence[_Case], cells: Sequence[_Cell], sampled: bool) -> Outcome:
    """Run a rule on one request for each cell, all in one batch."""
    width, size = max(case.length for case in cases), max(case.size for case in cases)
    # logits and drafts once for each (case, draft), then spread over its cells
    places = {key: i for i, key in enumerate(dict.fromkeys((c.case, c.draft) for c in cells))}
    logits = torch.full((len(places), width + 1, size), -torch.inf, dtype=torch.float64)
    draft_logits = torch.zeros((len(places), width, size), dtype=torch.float64)
    tokens = torch.zeros((len(places), width), dtype=torch.int64)
    for (index, x), i in places.items():
        case = cases[index]
        for j in range(case.length + 1):
            row = torch.tensor([float(v) for v in case.p[x[:j]]], dtype=torch.float64)
            logits[i, j, : case.size] = row.log() * TEMPERATURE
        for j, token in enumerate(x):
            row = torch.tensor([float(v) for v in case.q[x[:j]]], dtype=torch.float64)
            draft_logits[i, j] = -torch.inf
            draft_logits[i, j, : case.size] = row.log() * TEMPERATURE
            tokens[i, j] = token
    at = torch.tensor([places[cell.case, cell.draft] for cell in cells])
    lengths = torch.tensor([len(cell.draft) for cell in cells])
    judged = torch.arange(width + 1) <= lengths.unsqueeze(-1)  # [B, K + 1]
    probs = None
    if sampled:
        q = filtered_probs(draft_logits.flatten(0, 1).float(), _filters(len(places) * width))
        probs = q.view(draft_logits.shape)[at]
    noise = Noise(
        target=torch.tensor([u for cell in cells for u in cell.target], dtype=torch.float64),
        accept=torch.tensor(
            [[*cell.accept, *[0.5] * (width - len(cell.accept))] for cell in cells],
            dtype=torch.float64,
        ),
        recover=torch.tensor([cell.recover for cell in cells], dtype=torch.float64),
    )
    rows = logits[at][judged].float()  # [M, V]
    return rule(rows, _filters(len(rows)), Proposal(tokens[at], lengths, probs), noise)


def _filters(num_rows: int) -> FilterParams:
    params = FilterParams.from_params([SamplingParams(temperature=TEMPERATURE)])
    return params.repeat(torch.tensor([num_rows]), num_rows)


def _largest_error(case: _Case, emitted: Mapping[Tokens, Fraction]) -> Fraction:
    """Complete what was emitted with the target, and compare with the target's own k + 1 tokens."""
    length = case.length + 1
    joint = {y: -_chance(case.p, y) for y in product(range(case.size), repeat=length)}
    for start, weight in emitted.items():
        if max(start) >= case.size:
            return Fraction(1)  # there is no such token
        for rest in product(range(case.size), repeat=length - len(start)):
            y = (*start, *rest)
            tail = (case.p[y[:i]][y[i]] for i in range(len(start), length))
            joint[y] += math.prod(tail, start=weight)
    return max(abs(error) for error in joint.values())
