"""From a plan and its drafts to the flat tensors of one forward pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..types import ForwardInput, Proposal
from .scheduler import Plan

__all__ = ["build_batch", "row_positions"]


def build_batch(plan: Plan, proposal: Proposal, device: torch.device) -> ForwardInput:
    """Flatten a step. Sampling requests, in order, own one logit row more than they draft.

    Behind all of these come the rows that score prompts, entry by entry.

    Example: a request with tokens [5, 6, 7], two computed, draft [8, 9] contributes tokens
    [7, 8, 9] at positions [2, 3, 4], and all three rows of logits.
    """
    drafts = _drafts_by_entry(plan, proposal)
    token_ids: list[int] = []
    starts, logit_rows, scored_rows = [0], [], []
    positions = []
    num_fine = 0
    for entry, draft in zip(plan.entries, drafts, strict=True):
        end = entry.start + entry.num_tokens
        token_ids.extend(entry.request.tokens[entry.start : end])
        token_ids.extend(draft)
        positions.append(np.arange(entry.start, end + len(draft)))
        starts.append(len(token_ids))
        if not entry.is_bulk:
            num_fine = starts[-1]  # the plan has them first
        if entry.samples:
            logit_rows.append(np.arange(len(token_ids) - len(draft) - 1, len(token_ids)))
        offset = starts[-2] - entry.start
        scored_rows.append(np.arange(entry.scored.start, entry.scored.stop) + offset)
    rows = np.concatenate([*logit_rows, *scored_rows])

    def tensor(values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(device)

    return ForwardInput(
        token_ids=tensor(token_ids),
        positions=tensor(np.concatenate(positions)),
        starts=tensor(starts),
        block_tables=tensor(_tables(plan)),
        logit_rows=tensor(rows),
        num_fine=num_fine,
        num_sampling_rows=sum(map(len, logit_rows)),
    )


def row_positions(plan: Plan, lengths: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """List the absolute position of the token that each logit row decides, [M]."""
    parts = [
        np.arange(len(entry.request.tokens), len(entry.request.tokens) + length + 1)
        for entry, length in zip(plan.sampling, lengths, strict=True)
    ]
    return np.concatenate(parts)


def _drafts_by_entry(plan: Plan, proposal: Proposal) -> list[list[int]]:
    """List each entry's draft; entries that do not sample have none."""
    padded, lengths = proposal.tokens.tolist(), proposal.lengths.tolist()
    drafts = iter([row[:length] for row, length in zip(padded, lengths, strict=True)])
    return [next(drafts) if entry.samples else [] for entry in plan.entries]


def _tables(plan: Plan) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    width = max(len(entry.request.blocks) for entry in plan.entries)
    tables = np.zeros((len(plan.entries), width), np.int64)
    for row, entry in zip(tables, plan.entries, strict=True):
        row[: len(entry.request.blocks)] = entry.request.blocks
    return tables
