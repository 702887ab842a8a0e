"""From rows of several requests to the flat tensors of one pass of a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..types import ForwardInput, TreeRows

__all__ = ["HeadRows", "lay_out"]


@dataclass(frozen=True, slots=True)
class HeadRows:
    """One request's rows of a pass."""

    tokens: Sequence[int]  # each behind the position of its row's state
    positions: Sequence[int]  # of the states
    inputs: Tensor  # [n, I]
    blocks: Sequence[int]
    looks: Sequence[int]  # which of the rows guess, by index
    # Of a tree's nodes, for each row: the places of the positions from `branch_at` on, its own the
    # last. None: rows lie at their positions.
    branch_at: int | None = None
    paths: Sequence[Sequence[int]] = ()


def lay_out(pieces: Sequence[HeadRows]) -> tuple[ForwardInput, Tensor]:
    """Flatten requests' rows: the step, and the states that it reads [N, I]."""
    counts = [len(piece.tokens) for piece in pieces]
    starts = np.concatenate([[0], np.cumsum(counts)])
    tables = np.zeros((len(pieces), max(len(piece.blocks) for piece in pieces)), np.int64)
    for row, piece in zip(tables, pieces, strict=True):
        row[: len(piece.blocks)] = piece.blocks
    looks = [
        start + look for start, piece in zip(starts, pieces, strict=False) for look in piece.looks
    ]
    positions = np.array([each for piece in pieces for each in piece.positions], np.int64)
    step = ForwardInput(
        token_ids=torch.tensor([each for piece in pieces for each in piece.tokens]),
        positions=torch.from_numpy(positions),
        starts=torch.from_numpy(starts),
        block_tables=torch.from_numpy(tables),
        logit_rows=torch.tensor(looks, dtype=torch.int64),
        num_fine=len(positions),
        num_sampling_rows=len(looks),
        tree=_tree(pieces, positions)
        if any(piece.branch_at is not None for piece in pieces)
        else None,
    )
    inputs = [piece.inputs for piece in pieces]
    return step, inputs[0] if len(inputs) == 1 else torch.cat(inputs)


def _tree(
    pieces: Sequence[HeadRows], positions: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
) -> TreeRows:
    places, branch_at = positions.copy(), positions + 1
    depth = max(len(path) for piece in pieces for path in piece.paths or [()])
    paths = np.zeros((len(positions), depth), np.int64)
    row = 0
    for piece in pieces:
        if piece.branch_at is not None:
            for index, path in enumerate(piece.paths):
                paths[row + index, : len(path)] = path
                places[row + index], branch_at[row + index] = path[-1], piece.branch_at
        row += len(piece.tokens)
    return TreeRows(torch.from_numpy(places), torch.from_numpy(branch_at), torch.from_numpy(paths))
