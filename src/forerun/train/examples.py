"""What a head learns from: rows with their features, cut to batches of similar lengths.

Of a row of n tokens x, an answer behind a prompt of P, with the target's states f:

    head row t      reads token x[t + 1] and state f[t]; t = 0 .. n - 2
    look a          head row t = P - 1 + a, the first that a draft can begin at; a = 0 .. n - P - 2
    its label       state f[P + a]: the target's probabilities of token x[P + a + 1]

Rows of the prompt are seen by those behind them and guess nothing themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .feature_store import FeatureStore, RowFeatures
from .rows import Row

__all__ = ["Batch", "make_batch", "num_looks", "plan_batches", "usable"]

POOL = 16  # batches whose rows are sorted by length together


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows side by side, padded at their ends. B rows of T head rows, A looks, N true looks."""

    embedded: Tensor  # [B, T, E] float32, the tokens as the target embeds them
    features: Tensor  # [B, T, I] float32, what the head reads of the target
    first: Tensor  # [B] int64, the head row of look 0
    is_look: Tensor  # [B, A] bool, False: padding
    finals: Tensor  # [N, E] float32, the target's final states at the looks' head rows
    labels: Tensor  # [N, E] float32, the target's final states that looks are to guess
    log_sums: Tensor  # [N] float32, of the target's logits there
    tops: Tensor  # [N] int64, its likeliest token there
    is_greedy: Tensor  # [N] bool: the text is what temperature 0 gives

    @property
    def ages(self) -> Tensor:  # [N] int64
        """Say of every true look which one of its row it is, counted from 0."""
        count = self.is_look.shape[1]
        return torch.arange(count).expand_as(self.is_look)[self.is_look]


def usable(rows: Sequence[Row]) -> list[Row]:
    """Keep the rows that have something to guess."""
    return [row for row in rows if num_looks(row) > 0 and row.prompt_ids]


def num_looks(row: Row) -> int:
    """Count the tokens of a row that a head learns to guess."""
    return len(row.answer_ids) - 1


def plan_batches(
    rows: Sequence[Row], num_tokens: int, dice: torch.Generator | None
) -> list[list[int]]:
    """Cut rows, by index, into batches of about `num_tokens` looks, padding included.

    Rows of similar lengths go together. With `dice` the order is another each time.
    """
    count = len(rows)
    order = torch.randperm(count, generator=dice).tolist() if dice else list(range(count))
    mean = max(sum(map(num_looks, rows)) / max(count, 1), 1.0)
    pool = max(int(POOL * num_tokens / mean), 1)
    batches: list[list[int]] = []
    for begin in range(0, count, pool):
        batch: list[int] = []
        for index in sorted(order[begin : begin + pool], key=lambda i: (num_looks(rows[i]), i)):
            # The last one is the longest, which all are padded to.
            if batch and (len(batch) + 1) * num_looks(rows[index]) > num_tokens:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    if dice is None:
        return batches
    return [batches[i] for i in torch.randperm(len(batches), generator=dice).tolist()]


def make_batch(
    rows: Sequence[Row],
    store: FeatureStore,
    layers: Sequence[int],
    embed: Callable[[Tensor], Tensor],
) -> Batch:
    """Read rows' features, those after `layers` side by side; none: the final ones."""
    read = [store.read(row.id) for row in rows]
    most = max(len(each.final) for each in read) - 1
    looks = [num_looks(row) for row in rows]
    starts = [len(row.prompt_ids) - 1 for row in rows]
    tokens = torch.zeros(len(rows), most, dtype=torch.int64)
    parts = []
    for row, line in zip(rows, tokens, strict=True):
        line[: len(row.prompt_ids) + len(row.answer_ids) - 1] = torch.tensor(
            [*row.prompt_ids, *row.answer_ids][1:]
        )
    for each in read:
        state = _inputs(each, layers)[:-1]
        parts.append(torch.nn.functional.pad(state, (0, 0, 0, most - len(state))))
    spans = [slice(start, start + count) for start, count in zip(starts, looks, strict=True)]
    after = [
        slice(start + 1, start + 1 + count) for start, count in zip(starts, looks, strict=True)
    ]
    return Batch(
        embedded=embed(tokens.flatten()).float().cpu().view(len(rows), most, -1),
        features=torch.stack(parts),
        first=torch.tensor(starts),
        is_look=torch.arange(max(looks)) < torch.tensor(looks)[:, None],
        finals=_join([each.final[span] for each, span in zip(read, spans, strict=True)]),
        labels=_join([each.final[span] for each, span in zip(read, after, strict=True)]),
        log_sums=torch.cat([each.log_sums[1:] for each in read]),
        tops=torch.cat([each.tops[1:] for each in read]),
        is_greedy=torch.tensor(
            [row.temperature == 0 for row, n in zip(rows, looks, strict=True) for _ in range(n)]
        ),
    )


def _inputs(features: RowFeatures, layers: Sequence[int]) -> Tensor:
    if not layers:
        return features.final.float()
    return torch.cat([features.layers[layer].float() for layer in layers], dim=-1)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)).float()
