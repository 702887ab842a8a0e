"""From a pass's logits to what each request gets: adjust, filter, accept, say log-probabilities.

Between pure tensors (`sampling`) and requests (`engine`): nothing here changes a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from ..sampling import (
    RULES,
    Chooser,
    FilterParams,
    History,
    Noise,
    Stream,
    adjust_logits,
    argmax_and_check,
    bad_rows,
    collect_adjustments,
    processed_logprobs,
    raw_logprobs,
    read_logprobs,
    sample_tokens,
    uniforms,
)
from ..types import Outcome, Proposal, TokenLogprob
from .batch import draft_depths, row_positions
from .constrain import hide_forbidden, mask_logits
from .guard import Guesses
from .request import Request
from .scheduler import Plan, PlanEntry

__all__ = ["Decision", "Fault", "decide", "score_prompts"]


class Fault(StrEnum):
    """Why a request's row of logits gives no token."""

    INVALID_LOGITS = "invalid_logits"  # NaN or infinity
    NO_TOKEN = "no_token"  # the request's options leave none possible


@dataclass(frozen=True, slots=True)
class Decision:
    """What a pass decided for one sampling request, before stops cut it."""

    candidates: tuple[int, ...]  # accepted draft tokens, then the next token
    num_accepted: int
    num_drafted: int
    draft_depth: int  # of the longest path; of a draft that is one path its length
    path: tuple[int, ...] | None  # the accepted nodes of a tree, from 1; None: the first ones
    fault: Fault | None  # candidates mean nothing then
    logprobs: tuple[TokenLogprob, ...] | None  # of the candidates, if the request wants them


@torch.inference_mode()
def decide(plan: Plan, guesses: Guesses, logits: Tensor, choose: Chooser) -> list[Decision]:
    """Accept drafts against rows of logits [M, V], which are changed on the way.

    `choose` names the rule for the drafts at hand.
    """
    proposal = guesses.proposal
    requests = [entry.request for entry in plan.sampling]
    if not requests:
        return []
    if all(each.is_plainly_greedy for each in requests):
        counts = (proposal.lengths + 1).tolist()
        dead = hide_forbidden(logits, guesses.masks, counts)
        return _decide_greedily(proposal, logits, dead)
    return _decide_by_rule(plan, guesses, logits, choose)


def _decide_by_rule(
    plan: Plan, guesses: Guesses, logits: Tensor, choose: Chooser
) -> list[Decision]:
    proposal = guesses.proposal
    requests = [entry.request for entry in plan.sampling]
    rows = _Rows(requests, proposal)
    broken = rows.owners[bad_rows(logits).cpu()].unique().tolist()
    raw = _keep_raw(requests, rows, logits)
    masked = mask_logits(logits, guesses.masks, rows.counts.tolist())
    first_dead = _adjust(requests, rows, logits, masked)
    params = FilterParams.from_params([each.params for each in requests], logits.device)
    params = params.repeat(rows.counts.to(logits.device), len(logits))
    # At temperature 0 every lossless rule keeps what equals the argmax.
    rule = RULES["point_mass"] if params.all_greedy else choose(proposal)
    if proposal.parents is not None:
        rule = RULES["point_mass"]  # of deterministic trees no rule keeps more
    noise = _noise(plan, rows, logits.device, only_target=rule is RULES["point_mass"])
    if proposal.parents is None:
        candidates = _read(rows, rule(logits, params, rows.on_device(logits.device), noise))
    else:
        samples = sample_tokens(logits, params, noise.target).tolist()
        candidates = [
            _walk(samples[start:], draft, parents)
            for start, draft, parents in zip(rows.starts, rows.drafts, rows.parents, strict=True)
        ]
    candidates = [
        _stop_at_dead(each, first_dead.get(index)) for index, each in enumerate(candidates)
    ]
    logprobs = _logprobs(requests, rows, candidates, raw, logits)
    decisions = []
    for index, chosen in enumerate(candidates):
        fault = Fault.NO_TOKEN if first_dead.get(index) == 0 else None
        if index in broken:
            fault = Fault.INVALID_LOGITS
        decisions.append(
            Decision(
                candidates=chosen.tokens,
                num_accepted=chosen.num_accepted,
                num_drafted=len(rows.drafts[index]),
                draft_depth=rows.depth_of(index),
                path=chosen.path,
                fault=fault,
                logprobs=logprobs.get(index),
            )
        )
    return decisions


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The accepted tokens of one request and the next one."""

    tokens: tuple[int, ...]
    num_accepted: int
    path: tuple[int, ...] | None = None  # see `Decision`


def _walk(samples: Sequence[int], draft: Sequence[int], parents: Sequence[int]) -> _Candidates:
    """Walk down a tree as far as the target's own samples go; the first without a child is next.

    Row 0 of `samples` judges the root's children, row n those of node n. The same as
    `accept_tree_samples`, for one request and without tensors.
    """
    children = {pair: node for node, pair in enumerate(zip(parents, draft, strict=True), 1)}
    path: list[int] = []
    tokens = [samples[0]]
    while (node := children.get((path[-1] if path else 0, tokens[-1]))) is not None:
        path.append(node)
        tokens.append(samples[node])
    return _Candidates(tuple(tokens), len(path), tuple(path))


def _stop_at_dead(chosen: _Candidates, dead: int | None) -> _Candidates:
    """Cut what lies behind a request's first dead row, if it has one and it was reached."""
    if not dead or chosen.num_accepted < dead:
        return chosen
    # The tokens before the dead row stand; the next step begins at it and fails.
    return _Candidates(chosen.tokens[:dead], dead - 1)


def _decide_greedily(proposal: Proposal, logits: Tensor, dead: frozenset[int]) -> list[Decision]:
    """Decide a batch at temperature 0 in which nobody wants anything else: no tensors needed.

    `dead` rows allow nothing: a request ends at its first, with the tokens before it.
    """
    tokens, bad = argmax_and_check(logits)
    decisions, start = [], 0
    padded, trees = proposal.tokens.tolist(), draft_depths(proposal)
    for draft, length, (depths, parents) in zip(
        padded, proposal.lengths.tolist(), trees, strict=True
    ):
        end = start + length + 1
        if parents is not None:
            chosen = _walk(tokens[start:end], draft[:length], parents)
        else:
            num_accepted = 0
            while num_accepted < length and draft[num_accepted] == tokens[start + num_accepted]:
                num_accepted += 1
            chosen = _Candidates(tuple(tokens[start : start + num_accepted + 1]), num_accepted)
        fault = Fault.INVALID_LOGITS if any(bad[start:end]) else None
        first_dead = next((row - start for row in range(start, end) if row in dead), None)
        if first_dead == 0 and fault is None:
            fault = Fault.NO_TOKEN
        chosen = _stop_at_dead(chosen, first_dead)
        deepest = int(depths.max()) if length else 0
        decisions.append(
            Decision(chosen.tokens, chosen.num_accepted, length, deepest, chosen.path, fault, None)
        )
        start = end
    return decisions


def score_prompts(entries: Sequence[PlanEntry], logits: Tensor) -> None:
    """Note the log-probabilities of prompt tokens that a pass has seen: its scored rows [S, V].

    The rows of each entry follow each other in the order of `PlanEntry.scored`.
    """
    scored = [entry for entry in entries if entry.scored]
    if not scored:
        return
    tokens = [e.request.tokens[position + 1] for e in scored for position in e.scored]
    wanted = [e.request.params.prompt_logprobs or 0 for e in scored for _ in e.scored]
    read = iter(read_logprobs(raw_logprobs(logits), tokens, wanted))
    for entry in scored:
        entry.request.prompt_logprobs.extend(next(read) for _ in entry.scored)


class _Rows:
    """Which rows of logits are whose."""

    def __init__(self, requests: Sequence[Request], proposal: Proposal) -> None:
        self.proposal = proposal
        self.lengths: list[int] = proposal.lengths.tolist()
        padded = proposal.tokens.tolist()
        self.drafts = [row[:length] for row, length in zip(padded, self.lengths, strict=True)]
        self.counts = proposal.lengths + 1  # [B]
        self.owners = torch.repeat_interleave(torch.arange(len(requests)), self.counts)  # [M]
        self.starts: list[int] = (self.counts.cumsum(0) - self.counts).tolist()
        self.trees = draft_depths(proposal)

    @property
    def parents(self) -> list[Sequence[int]]:
        """Which node each node follows, for paths too."""
        return [
            range(len(depths)) if parents is None else parents for depths, parents in self.trees
        ]

    def depth_of(self, index: int) -> int:
        """The length of a request's longest path."""
        depths = self.trees[index][0]
        return int(depths.max()) if len(depths) else 0

    def on_device(self, device: torch.device) -> Proposal:
        probs = self.proposal.probs
        return Proposal(
            self.proposal.tokens.to(device),
            self.proposal.lengths.to(device),
            None if probs is None else probs.to(device),
        )

    def of(self, index: int, count: int) -> slice:
        """The first `count` rows of a request."""
        return slice(self.starts[index], self.starts[index] + count)


def _keep_raw(requests: Sequence[Request], rows: _Rows, logits: Tensor) -> dict[int, Tensor]:
    """Copy the rows whose log-probabilities are wanted as the model gave them, by request."""
    return {
        index: logits[rows.of(index, len(rows.drafts[index]) + 1)].clone()
        for index, request in enumerate(requests)
        if request.params.logprobs is not None and request.params.logprobs_mode == "raw"
    }


def _adjust(
    requests: Sequence[Request], rows: _Rows, logits: Tensor, masked: Tensor | None
) -> dict[int, int]:
    """Apply what requests ask of single tokens; say which of their rows first leaves no token.

    `masked` are the rows that grammars have touched already. A dead row is given token 0. What is
    emitted before it is right whatever it holds, and the request ends where it is reached.
    """
    histories = [
        History(each.rules, each.counts, each.tokens, each.num_output, draft)
        for each, draft in zip(requests, rows.drafts, strict=True)
    ]
    adjustments = collect_adjustments(histories, logits.device)
    if adjustments is not None:
        adjust_logits(logits, adjustments)
        touched = adjustments.rows if masked is None else torch.cat([adjustments.rows, masked])
        touched = touched.unique()
    elif masked is not None:
        touched = masked
    else:
        return {}
    dead = touched[logits[touched].amax(-1) == -torch.inf]
    logits[dead, 0] = 0.0
    first_dead: dict[int, int] = {}
    for row in dead.tolist():
        owner = int(rows.owners[row])
        first_dead.setdefault(owner, row - rows.starts[owner])
    return first_dead


def _noise(plan: Plan, rows: _Rows, device: torch.device, *, only_target: bool) -> Noise:
    """Make a step's noise; `only_target` leaves out what point mass does not look at."""
    seeds = np.array([entry.request.seed for entry in plan.sampling], np.uint64)
    origins = np.array([len(entry.request.tokens) for entry in plan.sampling], np.int64)
    target = uniforms(
        seeds.repeat(rows.counts.numpy()), row_positions(plan, rows.proposal), Stream.TARGET
    ).to(device)
    if only_target:
        return Noise(target, target.new_empty((len(seeds), 0)), target.new_empty(0))
    width = rows.proposal.tokens.shape[1]
    of_drafts = origins[:, None] + np.arange(width)  # [B, K]
    many_seeds = np.repeat(seeds[:, None], width, axis=1)
    many_origins = np.repeat(origins[:, None], width, axis=1)
    return Noise(
        target=target,
        accept=uniforms(many_seeds, of_drafts, Stream.ACCEPT, many_origins).to(device),
        recover=uniforms(seeds, origins, Stream.RECOVER).to(device),
    )


def _read(rows: _Rows, outcome: Outcome) -> list[_Candidates]:
    """List each request's candidates and how many of them were accepted drafts."""
    pairs = zip(outcome.num_accepted.tolist(), outcome.next_tokens.tolist(), strict=True)
    return [
        _Candidates((*draft[:num_accepted], next_token), num_accepted)
        for draft, (num_accepted, next_token) in zip(rows.drafts, pairs, strict=True)
    ]


def _logprobs(
    requests: Sequence[Request],
    rows: _Rows,
    candidates: Sequence[_Candidates],
    raw: dict[int, Tensor],
    logits: Tensor,
) -> dict[int, tuple[TokenLogprob, ...]]:
    """Read the log-probabilities of the candidates of requests that want them, by request."""
    found = {}
    for index, request in enumerate(requests):
        if request.params.logprobs is None:
            continue
        tokens = candidates[index].tokens
        if index in raw:
            table = raw_logprobs(raw[index][: len(tokens)])
        else:
            own = FilterParams.from_params([request.params] * len(tokens), logits.device)
            table = processed_logprobs(logits[rows.of(index, len(tokens))], own)
        wanted = [request.params.logprobs] * len(tokens)
        found[index] = tuple(read_logprobs(table, tokens, wanted))
    return found
