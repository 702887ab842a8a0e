"""Slow twin of `forerun.sampling.filters`: one row at a time, plain Python floats, no sort tricks.

Shares no code with the package. `margin` says how far the nearest decision was from going the other
way, so that a test can leave out rows where float32 and float64 may rightly disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SlowRow:
    probs: list[float]
    margin: float


def filtered_row(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> SlowRow:
    """Filter one row in the documented order: temperature, min-p, top-k, top-p."""
    size = len(logits)
    top = max(logits)
    if temperature == 0:
        best = logits.index(top)
        return SlowRow([1.0 if i == best else 0.0 for i in range(size)], 1.0)
    odds = [math.exp((logit - top) / temperature) for logit in logits]
    margin = 1.0
    alive = set(range(size))
    if min_p > 0:
        alive = {i for i in range(size) if odds[i] >= min_p}
        margin = min([margin, *(abs(odds[i] / min_p - 1) for i in range(size) if odds[i] < 1)])
    if top_k > 0:
        by_logit = sorted((logits[i] for i in alive), reverse=True)
        cut = by_logit[min(top_k, len(by_logit)) - 1]
        alive = {i for i in alive if logits[i] >= cut}
    if top_p < 1:
        total = math.fsum(odds[i] for i in alive)
        kept: set[int] = set()
        mass = 0.0
        for value in sorted({logits[i] for i in alive}, reverse=True):
            # all tokens of this logit stand or fall together: the first of them decides
            if kept and mass / total >= top_p:
                break
            tied = {i for i in alive if logits[i] == value}
            kept |= tied
            mass += math.fsum(odds[i] for i in tied)
            margin = min(margin, abs(mass / total - top_p))
        alive = kept
    total = math.fsum(odds[i] for i in alive)
    return SlowRow([odds[i] / total if i in alive else 0.0 for i in range(size)], margin)
