"""Log-probabilities of tokens that were chosen, and of the likeliest ones beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..types import TokenLogprob
from .filters import FilterParams, filtered_probs

__all__ = ["processed_logprobs", "raw_logprobs", "read_logprobs"]


def raw_logprobs(logits: Tensor) -> Tensor:  # [R, V] -> [R, V] float32
    """The model's own distribution, before anything that a request asks for."""
    return torch.log_softmax(logits.float(), dim=-1)  # a row's bits depend on that row alone


def processed_logprobs(logits: Tensor, params: FilterParams) -> Tensor:  # [R, V] -> [R, V] float32
    """The distribution that was sampled from: of adjusted logits, after filters."""
    return filtered_probs(logits, params).log()


def read_logprobs(
    logprobs: Tensor,  # [R, V]
    tokens: Sequence[int],  # [R]
    num_top: Sequence[int],  # [R], how many of the likeliest each row wants
) -> list[TokenLogprob]:
    """Read the chosen token's log-probability and rank in each row, and the likeliest tokens'.

    Tokens that cannot be sampled (-inf) are not listed among the likeliest.
    """
    chosen = logprobs.gather(-1, torch.tensor(tokens, device=logprobs.device).unsqueeze(-1))
    ranks = (logprobs > chosen).sum(-1) + 1  # [R]
    width = max(num_top, default=0)
    values, ids = logprobs.topk(min(width, logprobs.shape[-1]), dim=-1)
    rows = zip(
        tokens, chosen.squeeze(-1).tolist(), ranks.tolist(), values.tolist(), ids.tolist(),
        num_top, strict=True,
    )  # fmt: skip
    return [
        TokenLogprob(token, logprob, rank, _likeliest(top_values[:count], top_ids[:count]))
        for token, logprob, rank, top_values, top_ids, count in rows
    ]


def _likeliest(values: list[float], ids: list[int]) -> tuple[tuple[int, float], ...]:
    pairs = [(token, value) for token, value in zip(ids, values, strict=True) if value > -torch.inf]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
