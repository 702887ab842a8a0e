"""Typical-p: keep the tokens whose surprise is nearest to the entropy.

Locally typical sampling (Meister et al. 2202.00666, section 3): sort by | -log p - H | and keep the
first tokens that add up to typical_p. Applied last, to what other filters left. Ties at the cut all
stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["atypical"]

FIRST_COLUMNS = 512  # most typical tokens that are sorted before all are


def atypical(weights: Tensor, typical_ps: Tensor, unit: float) -> Tensor:
    """Find what typical-p drops: whole-number weights [M, V], [M] float64 -> [M, V] bool.

    The entropy is a sum of whole numbers of 1 / unit, so it does not depend on the order of sums.
    """
    totals = weights.sum(-1, keepdim=True)  # [M, 1]
    probs = weights.double() / totals.double()
    surprise = -probs.log()  # [M, V], infinite where nothing is left
    terms = (probs * surprise).nan_to_num_(0.0)  # at most 1 / e each
    entropy = (terms * unit).to(torch.int64).sum(-1, keepdim=True).double() / unit
    distance = (surprise - entropy).abs_()
    needed = typical_ps.unsqueeze(-1) * totals.double()
    width = min(FIRST_COLUMNS, weights.shape[-1])
    cuts, short = _cuts(weights, distance, needed, width)
    if width < weights.shape[-1] and bool(short.any()):
        cuts, _ = _cuts(weights, distance, needed, weights.shape[-1])
    return (distance > cuts) & (typical_ps < 1).unsqueeze(-1)


def _cuts(
    weights: Tensor, distance: Tensor, needed: Tensor, width: int
) -> tuple[Tensor, Tensor]:  # -> [M, 1], [M, 1] bool
    """Find the distance at which the mass of the nearest is enough, and where it never is."""
    nearest = distance.topk(width, dim=-1, largest=False)  # [M, W], rising
    sums = weights.gather(-1, nearest.indices).cumsum(-1).double()
    index = (sums < needed).sum(-1, keepdim=True)
    return nearest.values.gather(-1, index.clamp_max(width - 1)), index >= width
