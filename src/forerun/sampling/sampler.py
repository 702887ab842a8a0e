"""Sampling: one uniform and one row of logits make one token, by inverse CDF in vocabulary order.

Pure functions of tensors; the uniforms come from `noise`. The token of a row depends on that row,
its filters and its uniform, on nothing else in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import compiled
from .filters import FilterParams, bad_rows, filtered_weights, torch_weights, whole

__all__ = [
    "argmax_and_check",
    "sample_and_check",
    "sample_from_probs",
    "sample_tokens",
    "torch_sample",
]

MAX_NARROW = 1024  # above this many candidates the whole vocabulary is no dearer
TIE_COLUMNS = 24  # candidates beside the k asked for, for ties at the cut


def sample_tokens(logits: Tensor, params: FilterParams, uniforms: Tensor) -> Tensor:
    """Draw a token for each row: [M, V], M filters, [M] float64 in [0, 1) -> [M] int64.

    A row that `bad_rows` names gets some token id; it is for the caller to refuse it.
    """
    if compiled.fits(logits):
        return sample_and_check(logits, params, uniforms)[0]
    return torch_sample(logits, params, uniforms)


def argmax_and_check(logits: Tensor) -> tuple[list[int], list[bool]]:
    """Find each row's likeliest token, the first of equals, and which rows are `bad_rows`.

    What `sample_and_check` gives at temperature 0, at a tenth of the calls; a bad row's is token 0.
    """
    if compiled.fits(logits):
        return compiled.largest(logits)
    bad = bad_rows(logits)
    # Both in one copy: on a GPU each makes the host wait.
    tokens, flags = torch.stack([logits.argmax(-1).masked_fill(bad, 0), bad.long()]).tolist()
    return tokens, [flag != 0 for flag in flags]


def sample_and_check(
    logits: Tensor, params: FilterParams, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw a token for each row [M] and find the `bad_rows` [M] bool, on the CPU in one scan."""
    if not compiled.fits(logits):
        return torch_sample(logits, params, uniforms), bad_rows(logits)
    tokens, bad = compiled.sample(logits, params, uniforms)
    if params.any_typical:  # rows of their own: the others keep what they would have without them
        rows = (params.typical_ps < 1).nonzero().squeeze(-1)
        weights = filtered_weights(logits[rows], params.take(rows))
        tokens[rows] = _pick(weights, uniforms[rows])
    return tokens, bad


def torch_sample(logits: Tensor, params: FilterParams, uniforms: Tensor) -> Tensor:
    """Do what `sample_tokens` does, in plain torch: the path of other devices."""
    if params.all_greedy:
        return logits.argmax(-1)
    columns, ids = _narrow(logits.float(), params)
    picks = _pick(torch_weights(columns, params), uniforms)
    return picks if ids is None else ids.gather(-1, picks.unsqueeze(-1)).squeeze(-1)


def sample_from_probs(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token for each row: [M, V] not negative, of any sum above 0, [M] -> [M] int64."""
    return _pick(whole(probs / probs.amax(-1, keepdim=True)), uniforms)


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:  # [M, W] int64, [M] -> [M] int64
    """Find the column that holds the fraction `uniforms` of each row's sum; never one of weight 0.

    Weights [3, 0, 1]: the points 0, 1, 2 belong to column 0, the point 3 to column 2.
    """
    sums = weights.cumsum(-1)  # [M, W], exact
    totals = sums[:, -1]  # [M]
    points = (uniforms * totals.double()).to(torch.int64)
    points = torch.minimum(points, totals - 1).unsqueeze(-1)  # rounding may reach the total
    columns = torch.searchsorted(sums, points, right=True).squeeze(-1)  # first with sum > point
    return columns.clamp_max(weights.shape[-1] - 1)  # a row of NaN may find none


def _narrow(logits: Tensor, params: FilterParams) -> tuple[Tensor, Tensor | None]:
    """Keep the columns that can survive top-k, in order of their ids: [M, V] -> [M, W], [M, W].

    Returns all columns and None where that is not possible or not worth it.
    """
    width = params.max_top_k + TIE_COLUMNS
    if params.any_typical or not params.all_top_k or width > min(MAX_NARROW, logits.shape[-1] - 1):
        return logits, None
    values, ids = logits.topk(width, dim=-1)  # [M, W], falling
    cuts = values.gather(-1, params.top_ks.unsqueeze(-1) - 1)  # [M, 1], the k-th largest
    tied = (values[:, -1:] >= cuts) & (cuts > -torch.inf)  # and may go on past the last column
    if bool(tied.any()):
        return logits, None
    ids, order = ids.sort(dim=-1)
    return values.gather(-1, order), ids
