"""From a head's logits to its likeliest tokens and how likely they are."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from ..errors import InvalidLogits
from ..sampling import compiled

__all__ = ["DraftWords", "likeliest"]


class DraftWords:
    """What the target calls the tokens of a draft vocabulary."""

    def __init__(self, draft_ids: Tensor | None) -> None:
        self._ids = None if draft_ids is None else draft_ids.tolist()

    def name(self, index: int) -> int:
        """Give the target's id of a draft token."""
        return index if self._ids is None else self._ids[index]


def likeliest(
    logits: Tensor, count: int, words: DraftWords
) -> list[list[tuple[int, float]]]:  # [M, D] float32
    """List the `count` likeliest tokens of each row with their log-probabilities, best first.

    Raises:
        InvalidLogits: a row holds NaN or infinity.
    """
    count = min(count, logits.shape[1])
    find = _compiled if compiled.fits(logits) else by_torch
    values, indexes, sums = find(logits, count)
    for row, total in enumerate(sums):
        if not math.isfinite(total):
            raise InvalidLogits(f"a head's logits are NaN or infinite in row {row} of {len(sums)}")
    return [
        [
            # At most 0, whatever rounding does: a child must not score above its parent.
            (words.name(index), min(0.0, value - own[0] - math.log(total)))
            for index, value in zip(row, own, strict=True)
        ]
        for row, own, total in zip(indexes, values, sums, strict=True)
    ]


def by_torch(logits: Tensor, count: int) -> tuple[list[list[float]], list[list[int]], list[float]]:
    """Find the largest of each row, falling, where they are, and sums of exp(logit - largest)."""
    values, indexes = logits.topk(count, dim=-1)
    sums = (logits - values[:, :1]).exp().sum(-1) + (logits * 0).sum(-1)  # NaN where anything is
    return values.tolist(), indexes.tolist(), sums.tolist()


def _compiled(logits: Tensor, count: int) -> tuple[list[list[float]], list[list[int]], list[float]]:
    from ..kernels.top import likeliest as kernel  # here: numba takes a second to import

    # Rows of a pass are views into wider ones: their strides stay, so nothing is copied.
    rows = logits if logits.stride(-1) == 1 else logits.contiguous()
    values = np.empty((len(rows), count), np.float32)
    indexes = np.empty((len(rows), count), np.int64)
    sums = np.empty(len(rows), np.float32)
    width = rows.stride(0) if len(rows) > 1 else rows.shape[1]
    whole = rows.as_strided((len(rows), width), (width, 1))
    kernel(whole.numpy(), rows.shape[1], values, indexes, sums)
    return values.tolist(), indexes.tolist(), sums.tolist()
