"""Linear layers with their weights laid out once for the processor that runs them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Linear", "PlainLinear", "pack_linear"]


class Linear(Protocol):
    """y = x W^T + b for x [N, in] -> [N, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    """A weight as it is stored, [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class OneDnnLinear:
    """A weight reordered into oneDNN's blocked layout.

    bfloat16 with AMX: a third faster than the plain layout at a few rows, and flat for 1 to 16.
    float32 with AVX-512: a quarter slower at one row, twice as fast at eight. How many rows may
    share a call without changing each other's bits depends on the processor; `bits` finds out.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return result


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Choose the layout for this device and number format: the fastest over a few rows."""
    on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if on_cpu and weight.dtype == torch.bfloat16 and _mkldnn_bf16():
        return OneDnnLinear(weight, bias)
    if on_cpu and weight.dtype == torch.float32:
        return OneDnnLinear(weight, bias)
    return PlainLinear(weight, bias)


def _mkldnn_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
