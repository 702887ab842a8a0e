"""What compiled code is given of a step: tensors as numpy arrays, and the step's plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels import attention
from ..kernels.tiles import KEY_BLOCK, TILE_ROWS
from ..types import ForwardInput

__all__ = ["EVERYTHING", "Array", "StepPlan", "plan_step", "view", "view_optional"]

UNIT_TOKENS = 64  # tokens of one request that share a unit of attention work
EVERYTHING = 1 << 40  # a window that no context exceeds

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Where a step's tokens lie and how its attention is cut, see `kernels.attention`."""

    positions: Array  # [N]
    branch_at: Array  # [N], see `types.TreeRows`
    paths: Array  # [N, D]
    slots: Array  # [N]
    tables: Array  # [B, max_blocks]
    units: Array
    token_units: Array
    queries: Array  # scratch from here on
    partial: Array
    tops: Array
    totals: Array


def plan_step(step: ForwardInput, groups: int, share: int, size: int) -> StepPlan:
    """Plan a step for `groups` KV heads of `share` query heads each and `size` elements."""
    positions, starts = step.positions.numpy(), step.starts.numpy()
    tables = step.block_tables.numpy()
    owner = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    if step.tree is None:
        places, branch_at, paths = positions, positions + 1, np.zeros((len(positions), 0), np.int64)
    else:
        tree = step.tree
        places, branch_at, paths = (
            each.numpy() for each in (tree.places, tree.branch_at, tree.paths)
        )
    slots = tables[owner, places // KEY_BLOCK] * KEY_BLOCK + places % KEY_BLOCK
    units, token_units, num_rows = attention.plan_units(
        starts, positions, branch_at, share, groups, UNIT_TOKENS
    )
    return StepPlan(
        positions=positions,
        branch_at=branch_at,
        paths=paths,
        slots=slots,
        tables=tables,
        units=units,
        token_units=token_units,
        # The last tile of a head's rows may read beyond them: four rows of padding.
        queries=np.zeros((groups, len(positions) * share + TILE_ROWS, size), np.float32),
        partial=np.empty((num_rows, size), np.float32),
        tops=np.empty(num_rows, np.float32),
        totals=np.empty(num_rows, np.float32),
    )


def view(tensor: Tensor) -> Array:
    """See a CPU tensor as a numpy array without a copy; bfloat16 as its bits."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy()
    return array


def view_optional(tensor: Tensor | None, like: Tensor) -> Array:
    """The same for weights that a model may lack: an empty array then."""
    return view(like.new_empty(0) if tensor is None else tensor)
