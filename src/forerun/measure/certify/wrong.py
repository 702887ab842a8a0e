"""Negative controls: rules that are wrong in the ways in which others were, and must be caught."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...sampling import FilterParams, Noise, Rule, filtered_probs, sample_from_probs
from ...types import Outcome, Proposal

__all__ = ["WRONG_RULES"]


def inverted_ratio(
    logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise
) -> Outcome:
    grid = _Grid(logits, params, proposal)
    num_accepted = _first_failures(noise.accept < 1 / grid.ratios, grid.real)
    return Outcome(num_accepted, grid.draw_next(num_accepted, noise.recover))


def residual_forgotten(
    logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise
) -> Outcome:
    grid = _Grid(logits, params, proposal)
    num_accepted = _first_failures(noise.accept < grid.ratios, grid.real)
    return Outcome(num_accepted, sample_from_probs(grid.target_at(num_accepted), noise.recover))


def noise_reused(logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise) -> Outcome:
    grid = _Grid(logits, params, proposal)
    num_accepted = _first_failures(noise.accept < grid.ratios, grid.real)
    at = num_accepted.clamp_max(max(0, grid.width - 1)).unsqueeze(-1)
    if grid.width == 0:
        return Outcome(num_accepted, grid.draw_next(num_accepted, noise.recover))
    rejected = num_accepted < proposal.lengths
    same = noise.accept.gather(1, at).squeeze(-1)  # what rejected the token also draws the next
    return Outcome(
        num_accepted, grid.draw_next(num_accepted, torch.where(rejected, same, noise.recover))
    )


def bonus_from_draft(
    logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise
) -> Outcome:
    grid = _Grid(logits, params, proposal)
    num_accepted = _first_failures(noise.accept < grid.ratios, grid.real)
    right = grid.draw_next(num_accepted, noise.recover)
    if grid.width == 0:
        return Outcome(num_accepted, right)
    last = (proposal.lengths - 1).clamp_min(0)
    draft = sample_from_probs(grid.q[grid.each, last].double() + 1e-30, noise.recover)
    whole = (num_accepted == proposal.lengths) & (proposal.lengths > 0)
    return Outcome(num_accepted, torch.where(whole, draft, right))


def temperature_ignored(
    logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise
) -> Outcome:
    plain = replace(params, temperatures=torch.ones_like(params.temperatures))
    grid = _Grid(logits, plain, proposal)
    num_accepted = _first_failures(noise.accept < grid.ratios, grid.real)
    return Outcome(num_accepted, grid.draw_next(num_accepted, noise.recover))


def block_stops_early(
    logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise
) -> Outcome:
    grid = _Grid(logits, params, proposal)
    p = torch.ones_like(noise.recover)
    scales, passed = [p], []
    for i in range(1, grid.width + 1):
        p = (p * grid.ratios[:, i - 1]).clamp_max(1)
        h = p
        if i < grid.width:
            z = (p.unsqueeze(-1) * grid.p[:, i] - grid.q[:, i]).clamp_min(0).sum(-1)
            h = torch.where(p >= 1, 1.0, z / (z + 1 - p))
            h = torch.where(proposal.lengths == i, p, h)
        passed.append(noise.accept[:, i - 1] < h)
        scales.append(p)
    survive = torch.stack(passed, 1) if passed else grid.real
    num_accepted = _first_failures(survive, grid.real)
    scale = torch.stack(scales, 1).gather(1, num_accepted.unsqueeze(-1)).squeeze(-1)
    return Outcome(num_accepted, grid.draw_next(num_accepted, noise.recover, scale))


# name -> (rule, what it does)
WRONG_RULES: Mapping[str, tuple[Rule, str]] = {
    "inverted_ratio": (inverted_ratio, "accepts with q / p instead of p / q"),
    "residual_forgotten": (residual_forgotten, "draws from p after a rejection"),
    "noise_reused": (noise_reused, "draws the next token with the noise that rejected"),
    "bonus_from_draft": (bonus_from_draft, "draws the token after all drafts from the draft"),
    "temperature_ignored": (temperature_ignored, "judges by the target at temperature 1"),
    "block_stops_early": (block_stops_early, "block verification that stops at a failure"),
}


class _Grid:
    """Target and draft side by side: p [B, K + 1, V], q [B, K, V], p / q of drafted tokens [B, K].

    Padding has ratio 0 and is not `real`.
    """

    def __init__(self, logits: Tensor, params: FilterParams, proposal: Proposal) -> None:
        probs = filtered_probs(logits, params).double()  # [M, V]
        lengths = proposal.lengths
        self.width = proposal.tokens.shape[1]
        self.each = torch.arange(len(lengths))
        starts = (lengths + 1).cumsum(0) - (lengths + 1)  # [B]
        columns = torch.arange(self.width + 1)
        inside = columns <= lengths.unsqueeze(-1)  # [B, K + 1]
        rows = torch.where(inside, starts.unsqueeze(-1) + columns, starts.unsqueeze(-1))
        self.p = probs[rows]
        self.real = inside[:, 1:]
        self._lengths = lengths
        of_tokens = proposal.tokens.unsqueeze(-1)
        if proposal.probs is None:
            self.q = torch.zeros_like(self.p[:, : self.width]).scatter_(-1, of_tokens, 1.0)
        else:
            self.q = proposal.probs.double()
        ratios = self.p[:, : self.width].gather(-1, of_tokens) / self.q.gather(-1, of_tokens)
        self.ratios = ratios.squeeze(-1).nan_to_num(0.0)

    def target_at(self, num_accepted: Tensor) -> Tensor:
        return self.p[self.each, num_accepted]

    def draw_next(self, num_accepted: Tensor, noise: Tensor, scale: Tensor | None = None) -> Tensor:
        """Draw from the residual after a rejection, else from the target: rightly."""
        p = self.target_at(num_accepted)
        if self.width == 0:
            return sample_from_probs(p, noise)
        share = torch.ones_like(noise) if scale is None else scale
        q = self.q[self.each, num_accepted.clamp_max(self.width - 1)]
        residual = (share.unsqueeze(-1) * p - q).clamp_min(0)
        rejected = (num_accepted < self._lengths) & (residual.amax(-1) > 0)
        return sample_from_probs(torch.where(rejected.unsqueeze(-1), residual, p), noise)


def _first_failures(survive: Tensor, real: Tensor) -> Tensor:  # [B, K], [B, K] -> [B]
    return (survive & real).long().cumprod(-1).sum(-1)
