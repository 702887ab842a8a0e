"""Rows of random text and a tiny target, for tests of training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.train.rows import Row
from forerun.train.target import Target

VOCAB = 90  # below every tiny model's special tokens


def random_rows(
    count: int, seed: int = 0, lengths: Sequence[int] = (3, 9), *, prompt: int = 6
) -> list[Row]:
    """Make rows whose answers repeat a few tokens, so that there is something to learn."""
    dice = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high, (size,), generator=dice).tolist())

    rows = []
    for index in range(count):
        (size,) = draw(lengths[0], lengths[1] + 1, 1)
        rows.append(
            Row(
                id=index,
                prompt_ids=draw(0, VOCAB, prompt - index % 3),
                answer_ids=draw(0, 12, size),
                temperature=float(index % 2),
                seed=0,
                topic="none",
                source="given",
                finish="stop",
                messages=(),
            )
        )
    return rows


def logits_of(target: Target, tokens: Sequence[int]) -> torch.Tensor:
    """Run the target over one sequence alone: logits of every position [n, V]."""
    from forerun.cache.kv_cache import KVCache
    from forerun.model.decoder import KEY_BLOCK
    from forerun.types import ForwardInput

    decoder = target.decoder
    cache = KVCache(decoder.cache_shape(KEY_BLOCK), -(-len(tokens) // KEY_BLOCK), decoder.device)
    step = ForwardInput.of_one_request(torch.tensor(tokens), 0, KEY_BLOCK)
    return decoder.forward(step, cache)
