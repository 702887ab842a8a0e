"""A drafter that samples, for certificates: the target's own distribution, shaken.

The rules for sampled drafts need a draft that is near the target and not the same, in every engine
and for every model, or wrong rules would go unseen. This one is told the exact distribution after
every path (`live.Paths`) and makes some tokens likelier by more than half, others less likely: so
that rejections are common at every level of p / q, and what follows them matters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...draft.base import Abilities
from ...sampling import Stream, derive_seed, sample_from_probs, uniforms
from ...types import DraftRequest, Features, Proposal, RequestOutcome

__all__ = ["PerturbedTarget"]

FACTORS = (0.4, 1.6, 1.6, 0.4)  # by rank in the target, over and over

Path = tuple[int, ...]


class PerturbedTarget:
    """Fills the draft length that each request asks for: no length is chosen by what was drawn."""

    abilities = Abilities(gives_probs=True)

    def __init__(
        self,
        vocab_size: int,
        seed: int,
        num_prompt: int,  # tokens before the paths begin
        after: Mapping[Path, Mapping[int, float]],  # the next token's distribution after each path
    ) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._num_prompt = num_prompt
        self._after = {path: _perturb(probs) for path, probs in after.items()}

    def start(self, request: DraftRequest) -> None:
        """Keep nothing."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        width = max((each.max_draft for each in requests), default=0)
        tokens = torch.zeros((len(requests), width), dtype=torch.int64)
        probs = torch.zeros((len(requests), width, self._vocab_size))
        paths = [tuple(each.tokens[self._num_prompt :]) for each in requests]
        for place in range(width):
            rows = [row for row, each in enumerate(requests) if each.max_draft > place]
            tables = [self._after[paths[row]] for row in rows]
            noise = self._noise([requests[row] for row in rows], place)
            for row, (ids, shares), at in zip(rows, tables, _draw(tables, noise), strict=True):
                probs[row, place, torch.from_numpy(ids)] = torch.from_numpy(shares)
                tokens[row, place] = int(ids[at])
                paths[row] = (*paths[row], int(ids[at]))
        lengths = torch.tensor([each.max_draft for each in requests], dtype=torch.int64)
        return Proposal(tokens, lengths, probs)

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        """Learn nothing."""

    def finish(self, request_id: int) -> None:
        """Drop nothing."""

    def _noise(self, requests: Sequence[DraftRequest], place: int) -> Tensor:  # -> [rows]
        seeds = [derive_seed(self._seed, each.request_id + 1) for each in requests]
        origins = np.array([len(each.tokens) for each in requests], np.int64)
        return uniforms(np.array(seeds, np.uint64), origins + place, Stream.DRAFT, origins)


def _perturb(probs: Mapping[int, float]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Make every other token likelier and the rest less likely: (token ids, rising; shares)."""
    falling = sorted(probs, key=lambda token: (-probs[token], token))
    factors = {token: FACTORS[rank % len(FACTORS)] for rank, token in enumerate(falling)}
    total = sum(probs[token] * factors[token] for token in probs)
    ids = sorted(probs)
    shares = [probs[token] * factors[token] / total for token in ids]
    return np.array(ids, np.int64), np.array(shares, np.float32)


def _draw(
    tables: Sequence[tuple[NDArray[np.int64], NDArray[np.float32]]], noise: Tensor
) -> list[int]:
    """Draw a column from each table's shares, as they stand in the proposal."""
    if not tables:
        return []
    width = max(len(shares) for _, shares in tables)
    padded = torch.zeros((len(tables), width))
    for row, (_, shares) in enumerate(tables):
        padded[row, : len(shares)] = torch.from_numpy(shares)
    columns: list[int] = sample_from_probs(padded, noise).tolist()
    return columns
