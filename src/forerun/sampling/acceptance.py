"""Acceptance rules: which draft tokens survive, and which token the target adds after them.

Pure functions of tensors. Nothing here knows about models, caches or requests.

Layout: request b drafted lengths[b] tokens and owns lengths[b] + 1 consecutive rows of the
target's flat output; row i judges draft token i, the last one comes after all draft tokens.
Letters as in the papers: p target, q draft, u noise, both distributions after the same filters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Outcome, Proposal
from .target import DenseTarget, Target

__all__ = ["accept_block", "accept_samples", "accept_tokens"]


def accept_samples(samples: Tensor, proposal: Proposal) -> Outcome:  # [M] int64
    """Keep drafts while they equal the target's own sample; the first other sample is next.

    The rule for deterministic drafts (point mass), and with argmax for samples the greedy rule.
    Lossless for any sampler, since every emitted token is the target's own sample.
    """
    starts, rows, real = _layout(proposal)
    matches = (samples[rows] == proposal.tokens) & real  # [B, K]
    num_accepted = matches.long().cumprod(-1).sum(-1)  # [B]
    return Outcome(num_accepted, samples[starts + num_accepted])


def accept_tokens(
    target: Tensor | Target,  # probabilities [M, V], or what knows them
    proposal: Proposal,
    accept_noise: Tensor,  # [B, K] float64 in [0, 1), its own stream
    recover_noise: Tensor,  # [B] float64 in [0, 1), its own stream
) -> Outcome:
    """Token rejection sampling (Leviathan 2211.17192, algorithm 1; Chen 2302.01318, theorem 1).

    Keep draft token x with probability min(1, p(x) / q(x)); at the first rejection draw from
    norm(max(0, p - q)), after the last draft token from p.
    """
    starts, rows, real = _layout(proposal)
    target = DenseTarget(target) if isinstance(target, Tensor) else target
    q = _draft_probs(proposal, target.vocabulary)  # [B, K, V]
    p_x = target.of_tokens(rows, proposal.tokens)  # [B, K]
    q_x = _of_tokens(q, proposal.tokens)  # [B, K]
    # u < p / q without the division: q = 0 cannot be drawn, and p = 0 is never kept
    survive = (accept_noise * q_x < p_x) & real
    num_accepted = survive.long().cumprod(-1).sum(-1)  # [B]
    scale = torch.ones_like(recover_noise)
    next_tokens = _draw_next(target, q, proposal, starts, num_accepted, scale, recover_noise)
    return Outcome(num_accepted, next_tokens)


def accept_block(
    target: Tensor | Target,  # probabilities [M, V], or what knows them
    proposal: Proposal,
    accept_noise: Tensor,  # [B, K] float64 in [0, 1); see `noise.uniforms` on origins
    recover_noise: Tensor,  # [B] float64 in [0, 1), its own stream
) -> Outcome:
    """Block verification (Sun et al. 2403.10444, algorithm 2): keep the longest prefix that passes.

    Never accepts fewer tokens in expectation than `accept_tokens`; the same with one draft token or
    deterministic drafts. A failure at i does not stop the search: a longer prefix may still pass.
    """
    starts, rows, real = _layout(proposal)
    target = DenseTarget(target) if isinstance(target, Tensor) else target
    q = _draft_probs(proposal, target.vocabulary)  # [B, K, V]
    ratios = target.of_tokens(rows, proposal.tokens) / _of_tokens(q, proposal.tokens)
    ratios = ratios.nan_to_num(0.0)  # 0/0 is padding, or a token that q cannot draw

    p = torch.ones_like(recover_noise)  # [B], p_0 = 1
    num_accepted = torch.zeros_like(proposal.lengths)  # [B]
    scale = p  # [B], p at num_accepted
    for i in range(1, proposal.tokens.shape[1] + 1):
        p = (p * ratios[:, i - 1]).clamp_max(1)  # p_i = min(1, p_{i-1} * P_t(x_i) / P_d(x_i))
        h = p  # of a request's last draft token
        if i < proposal.tokens.shape[1]:
            # h_i = Z_i / (Z_i + 1 - p_i), Z_i = sum(max(0, p_i * P_t - P_d)) after i tokens
            shares = torch.where(proposal.lengths > i, p, 1.0)  # of the others nobody asks
            z = target.excess(shares, rows[:, i], q, torch.full_like(proposal.lengths, i))
            passes = torch.where(p >= 1, 1.0, z / (z + 1 - p))  # 0/0: p = 1 passes, also if Z = 0
            h = torch.where(proposal.lengths == i, p, passes)
        passed = (accept_noise[:, i - 1] < h) & real[:, i - 1]
        num_accepted = torch.where(passed, i, num_accepted)  # the longest: later ones win
        scale = torch.where(passed, p, scale)
    next_tokens = _draw_next(target, q, proposal, starts, num_accepted, scale, recover_noise)
    return Outcome(num_accepted, next_tokens)


def _layout(proposal: Proposal) -> tuple[Tensor, Tensor, Tensor]:
    """Say where requests start [B], which row judges each draft [B, K], which drafts are real."""
    lengths = proposal.lengths
    starts = (lengths + 1).cumsum(0) - (lengths + 1)  # [B]
    index = torch.arange(proposal.tokens.shape[1], device=lengths.device)  # [K]
    real = index < lengths.unsqueeze(-1)  # [B, K]
    return starts, torch.where(real, starts.unsqueeze(-1) + index, 0), real


def _draft_probs(proposal: Proposal, vocabulary: int) -> Tensor:  # -> [B, K, V]
    """Give the draft's distributions; a deterministic draft is certain of its tokens."""
    if proposal.probs is not None:
        return proposal.probs
    shape = (*proposal.tokens.shape, vocabulary)
    q = torch.zeros(shape, device=proposal.tokens.device)
    return q.scatter_(-1, proposal.tokens.unsqueeze(-1), 1.0)


def _of_tokens(probs: Tensor, tokens: Tensor) -> Tensor:  # [B, K, V], [B, K] -> [B, K] float64
    return probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()


def _draw_next(
    target: Target,
    q: Tensor,  # [B, K, V]
    proposal: Proposal,
    starts: Tensor,  # [B]
    num_accepted: Tensor,  # [B]
    scale: Tensor,  # [B], what multiplies the target's probabilities in the residual
    noise: Tensor,  # [B]
) -> Tensor:  # [B]
    """Draw from norm(max(0, scale * p - q)) after a rejection, else from p."""
    rejected = num_accepted < proposal.lengths  # [B]
    last = num_accepted.clamp(max=max(proposal.tokens.shape[1] - 1, 0))
    return target.draw(starts + num_accepted, rejected, scale, q, last, noise)
