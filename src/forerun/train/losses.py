"""How far a head's guesses are from the target's probabilities, over the draft vocabulary.

Soft targets are the target's probabilities over all tokens, read off at those of the draft
vocabulary. They are not scaled to sum to one: where half of them lies on tokens that the head
cannot propose, a draft holds at most every second time, and the position counts half as much.

    cross-entropy   -sum p log q
    acceptance      -log sum min(p, q): the likelihood that a sampled draft holds (2602.23881)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["LOSSES", "Scored", "score", "soft_targets"]

LOSSES = ("cross-entropy", "acceptance")
TINY = 1e-6


@dataclass(frozen=True, slots=True)
class Scored:
    """What guesses are worth."""

    loss: Tensor  # [] with a gradient
    tops: Tensor  # [N] int64, the likeliest draft tokens
    overlaps: Tensor  # [N], sum min(p, q)


def soft_targets(labels: Tensor, vocabulary: Tensor, log_sums: Tensor) -> Tensor:
    """Read the target's probabilities at draft tokens off its states: [N, E] -> [N, D]."""
    with torch.no_grad():
        logits = labels @ vocabulary.T
        return logits.sub_(log_sums.unsqueeze(-1)).exp_()


def score(
    read: Tensor, vocabulary: Tensor, targets: Tensor, weights: Tensor, loss: str
) -> Scored:  # [N, E], [D, E], [N, D], [N]
    """Project guesses to the draft vocabulary and hold them against the target's probabilities.

    `weights` say how much each counts; the loss is their weighted sum.
    """
    total, tops, overlaps = _Score.apply(read, vocabulary, targets, weights, loss)  # type: ignore[no-untyped-call]
    return Scored(total, tops, overlaps)


class _Score(torch.autograd.Function):
    """The projection, the softmax and the loss in one: rows of D numbers are passed over rarely.

    The gradient is known in closed form, so it is made on the way forward, and the rows are gone
    before the next guess makes its own.
    """

    @staticmethod
    def forward(
        ctx: Any, read: Tensor, vocabulary: Tensor, targets: Tensor, weights: Tensor, loss: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        probs = read @ vocabulary.T  # [N, D], logits for now
        largest, tops = probs.max(-1)
        if loss == "cross-entropy":
            expected = torch.linalg.vecdot(targets, probs)  # [N], sum of p z
        probs.sub_(largest.unsqueeze(-1)).exp_()
        sums = probs.sum(-1)
        probs.div_(sums.unsqueeze(-1))
        overlaps = torch.minimum(probs, targets).sum(-1)
        if loss == "cross-entropy":
            mass = targets.sum(-1)  # [N]
            losses = mass * (sums.log() + largest) - expected
            if read.requires_grad:
                # d/dz of -sum p log q = mass * q - p
                probs.mul_(mass.unsqueeze(-1)).sub_(targets)
        else:
            losses = -overlaps.clamp_min(TINY).log()
            if read.requires_grad:
                # d/dz of -log sum min(p, q) = q (share of q below p - [q < p]) / sum min(p, q)
                below = probs < targets
                share = (probs * below).sum(-1, keepdim=True)
                probs.mul_(share - below.to(probs.dtype))
                probs.div_(overlaps.clamp_min(TINY).unsqueeze(-1))
        if read.requires_grad:
            ctx.save_for_backward((probs @ vocabulary).mul_(weights.unsqueeze(-1)))
        ctx.mark_non_differentiable(tops, overlaps)
        return (losses * weights).sum(), tops, overlaps

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (made,) = ctx.saved_tensors
        return made * gradients[0], None, None, None, None
