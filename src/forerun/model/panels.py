"""Weights in the layout of the compiled pass (`kernels.matrix`): panels of 16 outputs.

A weight that bfloat16 can hold exactly lies in two bytes, whatever format the pass computes in:
half the memory to read, and not one bit is lost. Models published in bfloat16 are all of that kind.
Eight bits lose something: they are for those who ask for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .weights import WeightSource

__all__ = ["PANEL", "all_fit_bf16", "allocate", "fill", "quantise", "read_rows"]

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


def allocate(num_layers: int, num_outputs: int, num_inputs: int, *, form: str) -> Array:
    """Make room for the matrices of some layers; `form` is float32, bfloat16 or int8.

    Zeros: outputs that fill up the last panel stay so.
    """
    panels = -(-num_outputs // PANEL)
    if form == "int8":
        return np.zeros((num_layers, panels, num_inputs // 2, 2 * PANEL), np.int8)
    if form == "bfloat16":
        return np.zeros((num_layers, panels, num_inputs // 2, PANEL), np.uint32)
    return np.zeros((num_layers, panels, num_inputs, PANEL), np.float32)


def fill(place: Array, weight: Tensor, scales: Array) -> None:
    """Write a weight [outputs, inputs] into one layer's panels.

    `scales` [panels * 16] are written too where weights are of eight bits, else it is empty.
    """
    outputs, inputs = weight.shape
    missing = place.shape[0] * PANEL - outputs
    if missing:
        weight = torch.cat([weight, weight.new_zeros(missing, inputs)])
    if place.dtype == np.int8:
        whole, found = quantise(weight)
        scales[:] = found.numpy()
        pairs = whole.view(torch.int16).view(-1, PANEL, inputs // 2)
        torch.from_numpy(place.view(np.int16)).copy_(pairs.transpose(1, 2))
    elif place.dtype == np.uint32:
        pairs = weight.bfloat16().view(torch.int32).view(-1, PANEL, inputs // 2)
        torch.from_numpy(place.view(np.int32)).copy_(pairs.transpose(1, 2))
    else:
        columns = weight.float().view(-1, PANEL, inputs)
        torch.from_numpy(place).copy_(columns.transpose(1, 2))


def read_rows(place: Array, scales: Array, outputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Read outputs [n] of one layer's panels back as rows of weights [n, inputs]."""
    ids = outputs.cpu().numpy()
    panels, lanes = ids // PANEL, ids % PANEL
    if place.dtype == np.int8:
        pairs = place.reshape(*place.shape[:2], PANEL, 2)[panels, :, lanes]  # [n, inputs / 2, 2]
        rows = pairs.reshape(len(ids), -1) * scales[ids, None]
    elif place.dtype == np.uint32:
        bits = np.ascontiguousarray(place[panels, :, lanes]).view(np.int16)  # [n, inputs]
        return torch.from_numpy(bits).view(torch.bfloat16).to(dtype)
    else:
        rows = place[panels, :, lanes]
    return torch.from_numpy(np.ascontiguousarray(rows, np.float32)).to(dtype)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [outputs, inputs] to eight bits: whole numbers int8, scales [outputs] float32.

    The scale of an output is its largest weight / 127, the usual choice of ONNX and OpenVINO.
    """
    weight = weight.float()
    scales = weight.abs().amax(1) / 127
    factors = torch.where(scales > 0, 1 / scales, torch.zeros_like(scales))
    whole = (weight * factors.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
    return whole, scales
