"""From a draft model's logits to draft tokens: the likeliest, or a sample and its distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..sampling import (
    FilterParams,
    Stream,
    argmax_and_check,
    bad_rows,
    filtered_probs,
    sample_from_probs,
    uniforms,
)
from ..types import DraftRequest

__all__ = ["pick_likeliest", "pick_sample"]


def pick_likeliest(logits: Tensor) -> tuple[list[int], list[float], list[bool]]:
    """Pick each row's likeliest token [M, W]: the tokens, how likely they are, the bad rows."""
    tokens, bad = argmax_and_check(logits)
    likely = (logits.amax(-1) - logits.logsumexp(-1)).exp()
    return tokens, likely.tolist(), bad


def pick_sample(
    logits: Tensor, requests: Sequence[DraftRequest], place: int
) -> tuple[list[int], Tensor, list[bool]]:
    """Draw each row's token [M, W] as its request asks: tokens, their distributions, the bad rows.

    It will stand `place` positions after the request's tokens. The distribution is what the
    acceptance rules are told, so the token is drawn from it as it stands in float32. Bad rows draw
    token 0, for certain.
    """
    bad = bad_rows(logits)
    if bool(bad.any()):
        certain = torch.full_like(logits[:1], -torch.inf)
        certain[:, 0] = 0.0
        logits = torch.where(bad.unsqueeze(-1), certain, logits)
    params = FilterParams.from_params([each.params for each in requests], logits.device)
    probs = filtered_probs(logits, params)  # [M, W]
    origins = np.array([len(each.tokens) for each in requests], np.int64)
    seeds = np.array([each.seed for each in requests], np.uint64)
    noise = uniforms(seeds, origins + place, Stream.DRAFT, origins).to(logits.device)
    tokens: list[int] = sample_from_probs(probs, noise).tolist()
    return tokens, probs, bad.tolist()
