"""From a plan and its drafts to the flat tensors of one forward pass.

Nodes of a draft tree are rows like any other: their position is the root's plus their depth, and
their keys and values lie one after the other behind the committed tokens'.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..types import ForwardInput, Proposal, TreeRows
from .scheduler import Plan

__all__ = ["build_batch", "draft_depths", "row_positions"]

Ids = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


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
    depths = iter(draft_depths(proposal))
    trees: list[_Tree] = []
    num_fine = 0
    for entry, draft in zip(plan.entries, drafts, strict=True):
        end = entry.start + entry.num_tokens
        token_ids.extend(entry.request.tokens[entry.start : end])
        token_ids.extend(draft)
        positions.append(np.arange(entry.start, end + len(draft)))
        if entry.samples:
            depth, parents = next(depths)
            if parents is not None:
                trees.append(_Tree(len(token_ids) - len(draft), end, parents, depth))
                positions[-1][len(positions[-1]) - len(draft) :] = end - 1 + depth
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
        tree=_lay_out(trees, np.concatenate(positions), device) if trees else None,
    )


def row_positions(plan: Plan, proposal: Proposal) -> Ids:
    """List the absolute position of the token that each logit row decides, [M]."""
    parts = [
        len(entry.request.tokens) + np.concatenate([[0], depths])
        for entry, (depths, _) in zip(plan.sampling, draft_depths(proposal), strict=True)
    ]
    return np.concatenate(parts).astype(np.int64)


def draft_depths(proposal: Proposal) -> list[tuple[Ids, tuple[int, ...] | None]]:
    """Say for each request how deep its draft tokens lie, from 1, and which follow which.

    Parents (1, 1, 2) -> depths [1, 2, 2, 3] after a parent 0 in front. None for a path's parents.
    """
    lengths = proposal.lengths.tolist()
    if proposal.parents is None:
        return [(np.arange(1, length + 1), None) for length in lengths]
    found: list[tuple[Ids, tuple[int, ...] | None]] = []
    for row, length in zip(proposal.parents.tolist(), lengths, strict=True):
        parents = tuple(row[:length])
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        is_path = parents == tuple(range(length))
        found.append((np.array(depths[1:], np.int64), None if is_path else parents))
    return found


@dataclass(frozen=True, slots=True)
class _Tree:
    first_row: int
    root_end: int  # L, tokens before the tree
    parents: tuple[int, ...]
    depths: Ids  # of the nodes, from 1


def _lay_out(trees: list[_Tree], positions: Ids, device: torch.device) -> TreeRows:
    """Say where the rows of a step lie when some are trees' nodes, and what those see."""
    places, branch_at = positions.copy(), positions + 1
    paths = np.zeros((len(positions), max(int(tree.depths.max()) for tree in trees)), np.int64)
    for tree in trees:
        for node, parent in enumerate(tree.parents, 1):
            row = tree.first_row + node - 1
            places[row] = tree.root_end + node - 1
            branch_at[row] = tree.root_end
            depth = int(tree.depths[node - 1])
            if parent:
                paths[row, : depth - 1] = paths[tree.first_row + parent - 1, : depth - 1]
            paths[row, depth - 1] = places[row]

    def tensor(values: Ids) -> Tensor:
        return torch.from_numpy(values).to(device)

    return TreeRows(tensor(places), tensor(branch_at), tensor(paths))


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
