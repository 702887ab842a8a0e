"""Wrong rules on purpose: mistakes that others shipped, which every certificate must catch.

In the shape of `sampling.rules`, so that they can take the place of a right one in the live engine.
What is not wrong in a rule is the package's own code. Letters: p target, q draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...sampling import FilterParams, Noise, Rule, accept_tokens, sample_from_probs
from ...sampling.target import Target, find_target
from ...types import Outcome, Proposal

__all__ = ["WRONG_RULES"]


def inverted_ratio(
    logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise
) -> Outcome:
    """Keep draft token x with probability min(1, q(x) / p(x))."""
    step = _read(logits, params, proposal)
    survive = (noise.accept * step.p_x < step.q_x) & step.real
    num_accepted = survive.long().cumprod(-1).sum(-1)  # [B]
    scale = torch.ones_like(noise.recover)
    return Outcome(num_accepted, _draw_next(step, num_accepted, scale, noise.recover))


def residual_forgotten(
    logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise
) -> Outcome:
    """After a rejection draw from p, not from what q has left over of it."""
    step = _read(logits, params, proposal)
    right = accept_tokens(step.target, proposal, noise.accept, noise.recover)
    as_if_all_kept = replace(step, lengths=right.num_accepted)
    scale = torch.ones_like(noise.recover)
    next_tokens = _draw_next(as_if_all_kept, right.num_accepted, scale, noise.recover)
    return Outcome(right.num_accepted, next_tokens)


def noise_reused(logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise) -> Outcome:
    """Draw the recovered token with the noise that has just rejected the draft token."""
    target = find_target(logits, params)
    num_accepted = accept_tokens(target, proposal, noise.accept, noise.recover).num_accepted
    known = torch.cat([noise.accept, noise.recover.unsqueeze(-1)], dim=-1)  # [B, K + 1]
    used = torch.where(num_accepted < proposal.lengths, num_accepted, proposal.tokens.shape[1])
    recover = known.gather(-1, used.unsqueeze(-1)).squeeze(-1)  # [B]
    return accept_tokens(target, proposal, noise.accept, recover)


def bonus_from_draft(
    logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise
) -> Outcome:
    """When all draft tokens are kept, draw the next one from the draft's last distribution."""
    step = _read(logits, params, proposal)
    right = accept_tokens(step.target, proposal, noise.accept, noise.recover)
    all_kept = (right.num_accepted == step.lengths) & (step.lengths > 0)  # [B]
    owners = all_kept.nonzero().squeeze(-1)
    q = step.q[owners, step.lengths[owners] - 1]  # [n, V]
    next_tokens = right.next_tokens.clone()
    next_tokens[owners] = sample_from_probs(q, noise.recover[owners])
    return Outcome(right.num_accepted, next_tokens)


def temperature_ignored(
    logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise
) -> Outcome:
    """Judge with the target at temperature 1, whatever was asked for. Right where that was 1."""
    wrong = replace(params, temperatures=torch.ones_like(params.temperatures))
    return accept_tokens(find_target(logits, wrong), proposal, noise.accept, noise.recover)


def block_stops_early(
    logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise
) -> Outcome:
    """Block verification that stops at the first failed test. Right for a single draft token.

    Compare `accept_block`: the tests are the same, but a later one that passes no longer counts.
    """
    step = _read(logits, params, proposal)
    ratios = (step.p_x / step.q_x).nan_to_num(0.0)  # [B, K]
    p = scale = torch.ones_like(noise.recover)  # [B], p_0 = 1
    num_accepted = torch.zeros_like(step.lengths)  # [B]
    going = torch.ones_like(step.lengths, dtype=torch.bool)  # no test has failed yet
    for i in range(1, step.real.shape[1] + 1):
        p = (p * ratios[:, i - 1]).clamp_max(1)
        h = p  # of a request's last draft token
        if i < step.real.shape[1]:
            shares = torch.where(step.lengths > i, p, 1.0)
            at = torch.full_like(num_accepted, i)
            z = step.target.excess(shares, step.rows[:, i], step.q, at)
            passes = torch.where(p >= 1, 1.0, z / (z + 1 - p))
            h = torch.where(step.lengths == i, p, passes)
        going = going & (noise.accept[:, i - 1] < h) & step.real[:, i - 1]
        num_accepted = torch.where(going, i, num_accepted)
        scale = torch.where(going, p, scale)
    return Outcome(num_accepted, _draw_next(step, num_accepted, scale, noise.recover))


WRONG_RULES: Mapping[str, tuple[Rule, str]] = {
    "inverted_ratio": (inverted_ratio, "accepts with q / p instead of p / q"),
    "residual_forgotten": (residual_forgotten, "draws from the whole target after a rejection"),
    "noise_reused": (noise_reused, "recovers with the noise that rejected"),
    "bonus_from_draft": (bonus_from_draft, "draws the token after all drafts from the draft"),
    "temperature_ignored": (temperature_ignored, "judges with the target at temperature 1"),
    "block_stops_early": (block_stops_early, "stops block verification at the first failed test"),
}


@dataclass(frozen=True, slots=True)
class _Step:
    """What rules look at, laid out. Padding's numbers mean nothing."""

    target: Target
    lengths: Tensor  # [B]
    q: Tensor  # [B, K, V]
    p_x: Tensor  # [B, K] float64, of the draft tokens
    q_x: Tensor  # [B, K] float64
    starts: Tensor  # [B], each request's first row of the target
    rows: Tensor  # [B, K], the row that judges each draft token
    real: Tensor  # [B, K] bool, no padding


def _read(logits: Tensor, params: FilterParams, proposal: Proposal) -> _Step:
    target, tokens, lengths = find_target(logits, params), proposal.tokens, proposal.lengths
    q = proposal.probs
    if q is None:  # a deterministic draft is certain of its tokens
        q = torch.zeros((*tokens.shape, logits.shape[-1]), device=tokens.device)
        q.scatter_(-1, tokens.unsqueeze(-1), 1.0)
    starts = (lengths + 1).cumsum(0) - (lengths + 1)
    index = torch.arange(tokens.shape[1], device=tokens.device)  # [K]
    real = index < lengths.unsqueeze(-1)
    rows = torch.where(real, starts.unsqueeze(-1) + index, 0)
    p_x = target.of_tokens(rows, tokens)
    q_x = q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()
    return _Step(target, lengths, q, p_x, q_x, starts, rows, real)


def _draw_next(step: _Step, num_accepted: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
    """Draw from norm(max(0, scale * p - q)) after a rejection, else from p: all [B]."""
    rejected = num_accepted < step.lengths
    last = num_accepted.clamp(max=max(step.q.shape[1] - 1, 0))
    return step.target.draw(step.starts + num_accepted, rejected, scale, step.q, last, noise)
