"""The arrays of one compiled pass: what it is told of its step, and where it writes."""

from __future__ import annotations

import numpy as np

from ..kernels import forward as kernel
from ..kernels.matrix import PANEL
from ..kernels.team import new_counters
from ..types import ForwardInput
from .arch import ModelConfig
from .arrays import Array, StepPlan

__all__ = ["new_scratch", "step_arrays"]


def step_arrays(step: ForwardInput, plan: StepPlan, kept_layers: tuple[int, ...]) -> kernel.Step:
    """Tell a pass of its step; the states after `kept_layers` are kept."""
    return kernel.Step(
        tokens=step.token_ids.numpy(),
        positions=plan.positions,
        branch_at=plan.branch_at,
        paths=plan.paths,
        slots=plan.slots,
        tables=plan.tables,
        units=plan.units,
        token_units=plan.token_units,
        logit_rows=step.logit_rows.numpy(),
        kept_layers=np.array(kept_layers, np.int64),
    )


def new_scratch(
    shape: ModelConfig,
    plan: StepPlan,
    weights: kernel.Weights,
    x: Array,  # [N, E] as stored: what the layers begin with, or room for it
    *,
    num_logits: int,
    num_kept: int,
) -> kernel.Scratch:
    """Make room for a pass over x's rows through layers of this shape."""
    num_rows, size = x.shape
    most = max(num_rows, num_logits)
    mixed = shape.num_heads * shape.head_size
    wide = mixed + 2 * shape.num_kv_heads * shape.head_size
    is_whole = weights.qkv.dtype == np.int8

    def whole(rows: int, width: int) -> Array:  # rows as whole numbers, for weights of eight bits
        return np.empty((rows, width) if is_whole else (0, 0), np.int16)

    return kernel.Scratch(
        x=x,
        h=np.empty((most, size), np.float32),
        qkv=np.empty((num_rows, wide), x.dtype),
        queries=plan.queries,
        partial=plan.partial,
        tops=plan.tops,
        totals=plan.totals,
        mixed=np.empty((num_rows, mixed), np.float32),
        active=np.empty((num_rows, shape.intermediate_size), np.float32),
        logits=np.empty((num_logits, weights.head.shape[1] * PANEL), np.float32),
        kept=np.empty((num_kept, num_rows, size), x.dtype),
        whole_h=whole(most, size),
        whole_mixed=whole(num_rows, mixed),
        whole_active=whole(num_rows, shape.intermediate_size),
        row_scales=np.empty(most, np.float32),
        counters=new_counters(kernel.num_phases(shape.num_layers)),
    )
