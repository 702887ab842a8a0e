"""What a head would gain: how often chains of drafts hold, on rows that it has not learnt from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .examples import Batch
from .losses import score, soft_targets
from .net import HeadNet

__all__ = ["Acceptance", "evaluate"]

CHAIN = 4


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often the first d drafts of a chain all hold, for d = 1, 2, .."""

    greedy: tuple[float, ...]  # at temperature 0
    sampled: tuple[float, ...]  # drafts sampled from the head, at temperature 1: from sum min(p, q)
    num_drafts: int  # places where a chain was begun

    @property
    def greedy_length(self) -> float:
        """Tokens of a pass at temperature 0, the target's own included."""
        return 1 + sum(self.greedy)

    @property
    def sampled_length(self) -> float:
        return 1 + sum(self.sampled)

    @property
    def score(self) -> float:
        """One number to stop and to choose by."""
        return (self.greedy_length + self.sampled_length) / 2


def evaluate(
    net: HeadNet, batches: Iterable[Batch], vocabulary: Tensor, draft_ids: Tensor | None
) -> Acceptance:
    """Judge a head. Greedy chains count in rows of temperature 0 alone, if there are any.

    There the text is what the target would have said, so that a chain that holds goes on along it.
    """
    with torch.no_grad():
        parts = [_judge(net, batch, vocabulary, draft_ids) for batch in batches]
    hits = torch.cat([part[0] for part in parts], dim=1)
    overlaps = torch.cat([part[1] for part in parts], dim=1)
    is_there = torch.cat([part[2] for part in parts], dim=1)
    is_greedy = torch.cat([part[3] for part in parts])
    counted = is_there & is_greedy if bool(is_greedy.any()) else is_there
    return Acceptance(
        greedy=_means(hits.float().cumprod(0), counted),
        sampled=_means(overlaps.cumprod(0), is_there),
        num_drafts=int(is_there[0].sum()),
    )


def _judge(
    net: HeadNet, batch: Batch, vocabulary: Tensor, draft_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Line guesses up by the look that their chain began at: [chain, N] each."""
    targets = soft_targets(batch.labels, vocabulary, batch.log_sums)
    ages = batch.ages
    hits, overlaps, is_there = [], [], []
    for guess in net(batch, CHAIN, None):
        found = score(guess.read, vocabulary, targets, torch.ones(len(ages)), "cross-entropy")
        tops = found.tops if draft_ids is None else draft_ids[found.tops]
        hits.append(_earlier(tops == batch.tops, guess.depth))
        overlaps.append(_earlier(found.overlaps, guess.depth))
        is_there.append(_earlier(ages, guess.depth) == ages + guess.depth)
    return torch.stack(hits), torch.stack(overlaps), torch.stack(is_there), batch.is_greedy


def _earlier(x: Tensor, by: int) -> Tensor:
    """Give look n what look n + by has; the last ones get nothing that counts."""
    return torch.cat([x[by:], torch.zeros_like(x[:by])])


def _means(values: Tensor, counted: Tensor) -> tuple[float, ...]:  # [chain, N] each
    sums = (values * counted).sum(-1) / counted.sum(-1).clamp_min(1)
    return tuple(sums.tolist())
