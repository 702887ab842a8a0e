"""Whose hidden states a step computed, and which of them stand: what drafters with heads read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..types import Features, FeatureSpan, ForwardInput, HiddenStates, TokenView
from .scheduler import Plan

__all__ = ["Path", "gather_features"]

Path = tuple[int, ...]  # accepted nodes of a draft, counted from 1; of a chain 1, 2, ...


def gather_features(
    states: HiddenStates | None, batch: ForwardInput, plan: Plan, paths: Mapping[int, Path]
) -> Features | None:
    """Name the rows of every request in `paths`: its tokens, then the accepted part of its draft.

    A request that ended, or whose step was undone, has none.
    """
    if states is None:
        return None
    spans = []
    starts = batch.starts.tolist()
    for entry, start in zip(plan.entries, starts, strict=False):
        path = paths.get(entry.request.request_id)
        if path is not None:
            own = range(start, start + entry.num_tokens)
            drafted = [start + entry.num_tokens + node - 1 for node in path]
            request = entry.request
            rows = torch.tensor([*own, *drafted])
            blocks = TokenView(request.blocks)
            spans.append(FeatureSpan(request.request_id, entry.start, rows, blocks))
    return Features(states, tuple(spans))
