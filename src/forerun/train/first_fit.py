"""Where an EAGLE-1 head begins: the linear map that comes closest to the target's next state.

It takes one pass over the rows. The layer behind it begins at zero and learns what a linear map
cannot say.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .examples import Batch

__all__ = ["fit_fc"]

RIDGE = 1e-4  # of the mean square of an input


def fit_fc(net: nn.Module, batches: Iterable[Batch]) -> None:
    """Set `fc` by least squares from (token, state) to the next state, and silence the layer."""
    weight, bias = net.get_parameter("fc.weight"), net.get_parameter("fc.bias")
    size = weight.shape[1] + 1
    inner = torch.zeros(size, size, dtype=torch.float64)
    outer = torch.zeros(size, weight.shape[0], dtype=torch.float64)
    count = 0
    for batch in batches:
        x = _inputs(batch)
        inner += (x.T @ x).double()
        outer += (x.T @ batch.labels).double()
        count += len(x)
    # Tokens that are embedded small and states weigh alike: the ridge is relative to each input.
    diagonal = inner.diagonal()
    solved = torch.linalg.solve(inner + torch.diag(diagonal * RIDGE + count * 1e-9), outer)
    with torch.no_grad():
        weight.copy_(solved[:-1].T)
        bias.copy_(solved[-1])
        for name in ("layer.o.weight", "layer.down.weight"):
            net.get_parameter(name).zero_()


def _inputs(batch: Batch) -> Tensor:  # [N, 2 E + 1]
    count = batch.is_look.shape[1]
    rows = (batch.first[:, None] + torch.arange(count)).clamp_max(batch.embedded.shape[1] - 1)
    wide = rows.unsqueeze(-1).expand(-1, -1, batch.embedded.shape[-1])
    embedded = batch.embedded.gather(1, wide)[batch.is_look]
    return torch.cat([embedded, batch.finals, torch.ones(len(embedded), 1)], dim=-1)
