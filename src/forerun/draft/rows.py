"""From rows of several requests to the flat tensors of one pass of a draft model or head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..types import ForwardInput, TreeRows

__all__ = ["RequestRows", "lay_out"]


@dataclass(frozen=True, slots=True)
class RequestRows:
    """One request's rows of a pass."""

    tokens: Sequence[int]
    positions: Sequence[int]  # a head's: of the states that its rows read, one before the tokens'
    blocks: Sequence[int]  # of the request, as far as the rows reach at least
    looks: Sequence[int]  # which of the rows guess what comes next, by index
    # Of a tree's nodes, for each row: the places of the positions from `branch_at` on, its own the
    # last. None: rows lie at their positions.
    branch_at: int | None = None
    paths: Sequence[Sequence[int]] = ()


def lay_out(pieces: Sequence[RequestRows]) -> ForwardInput:
    """Flatten requests' rows to a step on the host."""
    counts = [len(piece.tokens) for piece in pieces]
    starts = np.concatenate([[0], np.cumsum(counts)])
    tables = np.zeros((len(pieces), max(len(piece.blocks) for piece in pieces)), np.int64)
    for row, piece in zip(tables, pieces, strict=True):
        row[: len(piece.blocks)] = piece.blocks
    looks = [
        start + look for start, piece in zip(starts, pieces, strict=False) for look in piece.looks
    ]
    positions = np.array([each for piece in pieces for each in piece.positions], np.int64)
    return ForwardInput(
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


def _tree(
    pieces: Sequence[RequestRows], positions: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
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
