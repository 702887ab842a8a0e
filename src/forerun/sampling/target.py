"""The target's distributions as acceptance rules ask for them: as probabilities, or as logits.

Rules need few numbers of most rows: p of a draft token, the mass of a residual, one draw. From
logits the compiled kernels find these without writing out probabilities; the answers are equal.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from . import compiled
from .filters import UNIT, FilterParams, filtered_probs, whole
from .sampler import sample_from_probs

__all__ = ["DenseTarget", "LogitsTarget", "Target", "find_target"]


class Target(Protocol):
    """Rows of the target. q are draft distributions [B, K, V]; `index` says which of the K."""

    @property
    def vocabulary(self) -> int: ...

    def of_tokens(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Look up p of tokens: [B, K], [B, K] -> [B, K] float64."""
        ...

    def excess(self, shares: Tensor, rows: Tensor, q: Tensor, index: Tensor) -> Tensor:
        """Compute sum(max(0, share * p - q)) for each request: all [B], -> [B] float64."""
        ...

    def draw(
        self,
        rows: Tensor,
        rejected: Tensor,
        shares: Tensor,
        q: Tensor,
        index: Tensor,
        noise: Tensor,
    ) -> Tensor:
        """Draw from norm(max(0, share * p - q)) where rejected, else from p: all [B], -> [B]."""
        ...


class DenseTarget:
    """Probabilities [M, V], on any device."""

    def __init__(self, probs: Tensor) -> None:
        self._probs = probs

    @property
    def vocabulary(self) -> int:
        return self._probs.shape[-1]

    def of_tokens(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return self._probs[rows, tokens].double()

    def excess(self, shares: Tensor, rows: Tensor, q: Tensor, index: Tensor) -> Tensor:
        more = shares.unsqueeze(-1) * self._probs[rows] - _at(q, index)  # [B, V]
        return whole(more.clamp_min_(0)).sum(-1).double() / UNIT

    def draw(
        self,
        rows: Tensor,
        rejected: Tensor,
        shares: Tensor,
        q: Tensor,
        index: Tensor,
        noise: Tensor,
    ) -> Tensor:
        p = self._probs[rows].double()  # [B, V]
        if q.shape[1] == 0:
            return sample_from_probs(p, noise)
        residual = (shares.unsqueeze(-1) * p - _at(q, index)).clamp_min_(0)
        # p = q up to rounding leaves nothing; then p itself is as good a residual
        rejected = rejected.unsqueeze(-1) & (residual.amax(-1, keepdim=True) > 0)
        return sample_from_probs(torch.where(rejected, residual, p), noise)


class LogitsTarget:
    """Logits on the CPU with their filters."""

    def __init__(self, logits: Tensor, params: FilterParams) -> None:
        self._rows = compiled.Rows(logits, params)
        self._rows.scan()

    @property
    def vocabulary(self) -> int:
        return int(self._rows.logits.shape[1])

    def of_tokens(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return self._rows.chances(rows.flatten(), tokens.flatten()).view(tokens.shape).double()

    def excess(self, shares: Tensor, rows: Tensor, q: Tensor, index: Tensor) -> Tensor:
        # nothing is left of a share of 0, and nobody asks at 1: see `accept_block`
        asked = ((shares > 0) & (shares < 1)).nonzero().squeeze(-1)
        masses = torch.zeros_like(shares)
        masses[asked] = self._rows.excess(
            rows[asked], q.flatten(0, 1), _places(q, index)[asked], shares[asked]
        )
        return masses

    def draw(
        self,
        rows: Tensor,
        rejected: Tensor,
        shares: Tensor,
        q: Tensor,
        index: Tensor,
        noise: Tensor,
    ) -> Tensor:
        places = torch.where(rejected, _places(q, index), -1)
        shares = torch.where(rejected, shares, 1.0)
        return self._rows.recover(rows, q.flatten(0, 1), places, shares, noise)


def find_target(logits: Tensor, params: FilterParams) -> Target:
    """Choose the quicker of the two for rows of logits [M, V]."""
    if compiled.fits(logits) and not params.any_typical:
        return LogitsTarget(logits, params)
    return DenseTarget(filtered_probs(logits, params))


def _at(q: Tensor, index: Tensor) -> Tensor:  # [B, K, V], [B] -> [B, V]
    return q[torch.arange(len(index), device=index.device), index]


def _places(q: Tensor, index: Tensor) -> Tensor:  # [B], rows of q.flatten(0, 1)
    return torch.arange(len(index)) * q.shape[1] + index
