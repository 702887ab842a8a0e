"""Weights in the layout of the compiled pass (`kernels.matrix`): panels of 16 outputs.

A weight that bfloat16 can hold exactly lies in two bytes, whatever format the pass computes in:
half the memory to read, and not one bit is lost. Models published in bfloat16 are all of that kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .weights import WeightSource

__all__ = ["PANEL", "all_fit_bf16", "allocate", "fill"]

PANEL = 16

Array = NDArray[Any]


def all_fit_bf16(source: WeightSource, names: Iterable[str]) -> bool:
    """Say whether bfloat16 holds these weights exactly."""
    for name in names:
        if source.dtype(name) == "BF16":
            continue
        weight = source.read(name)
        if not torch.equal(weight.bfloat16().to(weight.dtype), weight):
            return False
    return True


def allocate(num_layers: int, num_outputs: int, num_inputs: int, *, paired: bool) -> Array:
    """Make room for the matrices of some layers, [layers, panels, inputs or their pairs, 16].

    Zeros: outputs that fill up the last panel stay so.
    """
    panels = -(-num_outputs // PANEL)
    if paired:
        return np.zeros((num_layers, panels, num_inputs // 2, PANEL), np.uint32)
    return np.zeros((num_layers, panels, num_inputs, PANEL), np.float32)


def fill(place: Array, weight: Tensor) -> None:
    """Write a weight [outputs, inputs] into one layer's panels."""
    outputs, inputs = weight.shape
    missing = place.shape[0] * PANEL - outputs
    if missing:
        weight = torch.cat([weight, weight.new_zeros(missing, inputs)])
    if place.dtype == np.uint32:
        pairs = weight.bfloat16().view(torch.int32).view(-1, PANEL, inputs // 2)
        torch.from_numpy(place.view(np.int32)).copy_(pairs.transpose(1, 2))
    else:
        columns = weight.float().view(-1, PANEL, inputs)
        torch.from_numpy(place).copy_(columns.transpose(1, 2))
