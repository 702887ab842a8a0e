"""Acceptance drawn at a given rate, whatever was drafted: for the cost of systems, never for text.

With random weights, or with a drafter that is not trained yet, nothing is ever right. So each draft
token is kept with a fixed chance, and what comes out is no language model's text. It exists in
Python alone, for benchmarks: no configuration, command or server has a name for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sampling import Chooser, FilterParams, Noise
from ..types import Outcome, Proposal

__all__ = ["synthetic_acceptance"]


def synthetic_acceptance(rate: float) -> Chooser:
    """Make a rule that keeps each draft token that is reached with chance `rate`.

    Lossy on purpose. Requests must not be greedy (those never ask a rule), and drafts no trees.

    Raises:
        ValueError: the rate is no chance.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate={rate} is outside 0..1")

    def rule(logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise) -> Outcome:
        lengths = proposal.lengths
        index = torch.arange(proposal.tokens.shape[1], device=lengths.device)
        kept = (noise.accept < rate) & (index < lengths.unsqueeze(-1))  # [B, K]
        num_accepted = kept.long().cumprod(-1).sum(-1)
        starts = (lengths + 1).cumsum(0) - (lengths + 1)
        return Outcome(num_accepted, logits[starts + num_accepted].argmax(-1))

    return lambda proposal: rule
