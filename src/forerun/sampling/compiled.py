"""The way from tensors to the compiled kernels: the CPU path of filters, sampler and acceptance.

Kernels read tensors where they lie. Their definition of odds differs from torch's exp in the last
bits, so on one device everything goes one way: a request's draft and target distributions, samples
and weights all come from here, or all from torch.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from .filters import FilterParams

__all__ = [
    "MAX_VOCABULARY",
    "Rows",
    "bad_rows",
    "fits",
    "largest",
    "probabilities",
    "sample",
    "weights",
]

# From how many numbers on it is worth waking the other threads.
PARALLEL_SIZE = 1 << 18
MAX_VOCABULARY = 1 << 20  # times the largest weight fits int64


class Rows:
    """What one scan finds out about rows of logits, and the logits themselves."""

    def __init__(self, logits: Tensor, params: FilterParams) -> None:
        self.logits: NDArray[np.float32] = logits.detach().float().contiguous().numpy()  # [M, V]
        assert self.logits.shape[1] <= MAX_VOCABULARY, "sums of weights must fit int64"
        num_rows = len(self.logits)
        self.shapes = np.empty((num_rows, 4), np.float32)  # see kernels.draw
        self.totals = np.empty(num_rows, np.int64)  # 0: no distribution
        self.only = np.empty(num_rows, np.int64)
        self._filters = (
            params.temperatures.numpy(),
            params.top_ks.numpy(),
            params.top_ps.numpy(),
            params.min_ps.numpy(),
        )

    def scan(
        self,
        uniforms: Tensor | None = None,  # [M] float64
        tokens: Tensor | None = None,  # [M] int64, written
        probs: Tensor | None = None,  # [M, V] float32, written
    ) -> None:
        """Filter every row, and write what is asked for."""
        from ..kernels import draw  # here: numba takes a second to import

        size = self.logits.shape[1]
        run(
            draw.draw, self.logits.size,
            self.logits, *self._filters, self.shapes, self.totals, self.only,
            np.empty(0) if uniforms is None else uniforms.numpy(),
            np.empty(0, np.int64) if tokens is None else tokens.numpy(),
            np.empty((0, size), np.float32) if probs is None else probs.numpy(),
        )  # fmt: skip

    def weigh(self, weights: Tensor) -> None:
        """Write the weights [M, V] int64."""
        from ..kernels import draw

        draw.weigh(
            self.logits, *self._filters, self.shapes, self.totals, self.only, weights.numpy()
        )

    def chances(self, rows: Tensor, columns: Tensor) -> Tensor:  # [n], [n] -> [n] float32
        """Look up single probabilities, after a scan."""
        from ..kernels import residual

        size = self.logits.shape[1]
        assert bool(((columns >= 0) & (columns < size)).all()), "a token is outside the vocabulary"
        probs = torch.empty(rows.shape, dtype=torch.float32)
        residual.chances(*self._found, rows.numpy(), columns.numpy(), probs.numpy())
        return probs

    def excess(self, rows: Tensor, drafts: Tensor, places: Tensor, shares: Tensor) -> Tensor:
        """Sum max(0, share * p - q) for rows [n], q = drafts[places] -> [n] float64."""
        from ..kernels import residual

        masses = torch.empty(shares.shape, dtype=torch.float64)
        run(
            residual.excess, len(rows) * self.logits.shape[1],
            *self._found, rows.numpy(), _matrix(drafts), places.numpy(), shares.numpy(),
            masses.numpy(),
        )  # fmt: skip
        return masses

    def recover(
        self, rows: Tensor, drafts: Tensor, places: Tensor, shares: Tensor, noise: Tensor
    ) -> Tensor:
        """Draw from the residuals of rows [n] against q = drafts[places]; places -1: from p."""
        from ..kernels import residual

        tokens = torch.empty(rows.shape, dtype=torch.int64)
        run(
            residual.recover, len(rows) * self.logits.shape[1],
            *self._found, rows.numpy(), _matrix(drafts), places.numpy(), shares.numpy(),
            noise.contiguous().numpy(), tokens.numpy(),
        )  # fmt: skip
        return tokens

    @property
    def _found(self) -> tuple[NDArray[Any], ...]:
        return self.logits, self.shapes, self.totals, self.only


def fits(tensor: Tensor) -> bool:
    """Say whether the kernels can work on a tensor."""
    return tensor.device.type == "cpu" and _numba_is_here()


def sample(logits: Tensor, params: FilterParams, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token for each row [M], and say which rows are no distribution [M] bool."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    rows = Rows(logits, params)
    rows.scan(uniforms.contiguous(), tokens)
    return tokens, torch.from_numpy(rows.totals == 0)


def probabilities(logits: Tensor, params: FilterParams) -> Tensor:  # -> [M, V] float32
    """Compute filtered probabilities; NaN in rows that are no distribution."""
    probs = torch.empty(logits.shape, dtype=torch.float32)
    Rows(logits, params).scan(probs=probs)
    return probs


def weights(logits: Tensor, params: FilterParams) -> Tensor:  # -> [M, V] int64
    """Compute filtered weights, which `sample` draws from; 0 in rows that are no distribution."""
    result = torch.empty(logits.shape, dtype=torch.int64)
    Rows(logits, params).weigh(result)
    return result


def bad_rows(logits: Tensor) -> Tensor:  # [M, V] -> [M] bool
    """Find rows that are no distribution: NaN or +inf anywhere, or nothing above -inf."""
    from ..kernels import draw

    values = logits.detach().float().contiguous().numpy()
    bad = np.empty(len(values), np.bool_)
    run(draw.find_bad, values.size, values.view(np.uint32), bad)
    return torch.from_numpy(bad)


def largest(logits: Tensor) -> tuple[list[int], list[bool]]:
    """Find each row's largest logit, the first of equals, and whether the row is bad."""
    from ..kernels import draw

    values = logits.detach().float().contiguous().numpy()
    tokens, bad = np.empty(len(values), np.int64), np.empty(len(values), np.bool_)
    run(draw.find_largest, values.size, values, tokens, bad)
    return tokens.tolist(), bad.tolist()


def run(kernel: Callable[..., Any], size: int, *args: Any) -> None:
    """Run a kernel that shares its work in as many threads as torch has, if `size` is worth it."""
    from ..kernels.team import new_counters
    from ..kernels.workers import shared_workers

    count = torch.get_num_threads() if size >= PARALLEL_SIZE else 1
    shared_workers(count).run(kernel, *args, new_counters(1))


def _matrix(drafts: Tensor) -> NDArray[np.float32]:  # [n, V]
    matrix: NDArray[np.float32] = drafts.detach().float().contiguous().numpy()
    return matrix


@functools.cache
def _numba_is_here() -> bool:
    return importlib.util.find_spec("numba") is not None
