"""A picture of a run: loss and acceptance over what was learnt from. Needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DependencyMissing
from .checkpoint import Judgement

__all__ = ["draw_curves"]


def draw_curves(history: Sequence[Judgement], path: Path) -> None:
    """Draw the judgements of a run into a PNG file.

    Raises:
        DependencyMissing: matplotlib is not installed.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise DependencyMissing(
            "curves are drawn by matplotlib, which is not installed; pip install matplotlib (the "
            "figures themselves are in training.json)"
        ) from None
    figure = figures.Figure(figsize=(10, 4), layout="constrained")
    losses, rates = figure.subplots(1, 2)
    tokens = [each.num_tokens for each in history]
    losses.plot(tokens, [each.loss for each in history], marker="o")
    losses.set(xlabel="tokens learnt from", ylabel="loss, mean since the last judgement")
    chain = len(history[0].acceptance.greedy) if history else 0
    for index in range(chain):
        values = [each.acceptance.greedy[index] for each in history]
        rates.plot(tokens, values, marker="o", label=f"first {index + 1} hold")
    rates.set(xlabel="tokens learnt from", ylabel="of chains, temperature 0, held-out rows")
    rates.set_ylim(0, 1)
    rates.legend()
    figure.savefig(path, dpi=120)
