"""A pass laid out on the host: which rows of the step meet which blocks of the paged cache.

Requests of like sizes attend together, padded to one shape: a group. A request of many rows is
cut into pieces first, so that neither a long prompt beside single tokens nor a long context beside
short ones makes a group much larger than what is in it.

All of it lies in one flat buffer, whose layout follows from the shape alone. So a pass reaches a
device in one copy, and a captured pass finds its numbers where it found them before. Nothing here
computes attention (`torch_ops`) or knows what captures passes (`graphs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..types import ForwardInput, TreeRows

__all__ = [
    "Group",
    "GroupShape",
    "HostStep",
    "PassPlan",
    "PassShape",
    "Piece",
    "cut",
    "fill",
    "fit_pieces",
    "new_host_buffer",
    "plan_pass",
    "sort_into_groups",
]

PIECE_ROWS = 256  # most rows of a request that attend together
FEW_ROWS = 16  # so many and fewer share groups: tiles of a device are no smaller
MAX_GATHERED = 1 << 26  # numbers of keys, and of values, that a group may gather
MAX_SCORES = 1 << 24  # pairs of row and position in a group, for each head

Ids = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Piece(NamedTuple):
    """Consecutive rows of one request."""

    request: int
    first: int  # row of the step
    num_rows: int
    length: int  # positions that its last row sees: itself and all before it


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What a group is padded to."""

    num_pieces: int  # P
    num_rows: int  # T, of each piece
    num_blocks: int  # W, of each piece

    @property
    def sizes(self) -> list[int]:
        rows = self.num_pieces * self.num_rows
        return [rows, rows, self.num_pieces * self.num_blocks, self.num_pieces]


@dataclass(frozen=True, slots=True)
class PassShape:
    """What determines the layout of a pass's buffer, and what a captured pass can be used for."""

    num_rows: int  # N
    num_logit_rows: int  # M
    groups: tuple[GroupShape, ...]

    @property
    def sizes(self) -> list[int]:
        """Numbers of each part of the buffer, in order."""
        of_groups = [size for group in self.groups for size in group.sizes]
        return [*[self.num_rows] * 5, self.num_logit_rows, *of_groups]


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces that attend together. Rows beyond a piece's own repeat its last one."""

    rows: Tensor  # [P, T] int64, rows of the step
    positions: Tensor  # [P, T] int64
    tables: Tensor  # [P, W] int64, blocks; beyond a piece's own any block
    lengths: Tensor  # [P] int64, positions that count


@dataclass(frozen=True, slots=True)
class PassPlan:
    """All that a pass is told, as parts of one buffer."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    blocks: Tensor  # [N] int64, where each row's keys and values go
    offsets: Tensor  # [N] int64
    places: Tensor  # [N] int64, where in the groups' rows, one after another, each row is
    logit_rows: Tensor  # [M] int64
    groups: tuple[Group, ...]
    tree: TreeRows | None = None  # where some rows see their own paths alone

    @staticmethod
    def over(buffer: Tensor, shape: PassShape) -> PassPlan:
        """See a flat buffer as a plan."""
        parts = iter(buffer.split(shape.sizes))

        def next_group(of: GroupShape) -> Group:
            return Group(
                rows=next(parts).view(of.num_pieces, of.num_rows),
                positions=next(parts).view(of.num_pieces, of.num_rows),
                tables=next(parts).view(of.num_pieces, of.num_blocks),
                lengths=next(parts),
            )

        return PassPlan(
            token_ids=next(parts),
            positions=next(parts),
            blocks=next(parts),
            offsets=next(parts),
            places=next(parts),
            logit_rows=next(parts),
            groups=tuple(next_group(each) for each in shape.groups),
        )


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step's numbers where the host reads them."""

    token_ids: Ids
    positions: Ids
    cache_places: Ids  # where in its request's cache each row lies: its position, but for trees
    starts: list[int]
    tables: Ids
    logit_rows: Ids

    @staticmethod
    def of(step: ForwardInput) -> HostStep:
        """Read a step. One that lies on a device waits for it; the engine's lie on the host."""
        return HostStep(
            token_ids=step.token_ids.cpu().numpy(),
            positions=step.positions.cpu().numpy(),
            cache_places=(step.positions if step.tree is None else step.tree.places).cpu().numpy(),
            starts=step.starts.tolist(),
            tables=step.block_tables.cpu().numpy(),
            logit_rows=step.logit_rows.cpu().numpy(),
        )


def plan_pass(step: ForwardInput, block_size: int, width: int, device: torch.device) -> PassPlan:
    """Plan a step as it is and hand it to the device; `width` numbers are a position's keys."""
    host = HostStep.of(step)
    groups = sort_into_groups(cut(host), block_size, width)
    shape = PassShape(
        num_rows=len(host.token_ids),
        num_logit_rows=len(host.logit_rows),
        groups=tuple(_shape_of(group, block_size) for group in groups),
    )
    buffer = new_host_buffer(shape, device)
    fill(PassPlan.over(buffer, shape), host, groups, block_size)
    plan = PassPlan.over(buffer.to(device, non_blocking=True), shape)
    if step.tree is None:
        return plan
    tree = step.tree
    return replace(
        plan,
        tree=TreeRows(tree.places.to(device), tree.branch_at.to(device), tree.paths.to(device)),
    )


def new_host_buffer(shape: PassShape, device: torch.device) -> Tensor:
    """Make a buffer on the host that a device can fetch while the host goes on."""
    pinned = device.type == "cuda"
    return torch.empty(sum(shape.sizes), dtype=torch.int64, pin_memory=pinned)


def cut(step: HostStep) -> list[Piece]:
    """Cut requests into pieces; 300 rows after 10 positions -> 256 that see 266, 44 that see 310.

    A piece gathers what its last row sees, so early pieces of a long prompt are cheap.
    """
    pieces = []
    for request, (start, end) in enumerate(pairwise(step.starts)):
        for first in range(start, end, PIECE_ROWS):
            num_rows = min(PIECE_ROWS, end - first)
            length = int(step.cache_places[first + num_rows - 1]) + 1
            pieces.append(Piece(request, first, num_rows, length))
    return pieces


def sort_into_groups(pieces: Sequence[Piece], block_size: int, width: int) -> list[list[Piece]]:
    """Put pieces of like sizes together, as many as memory is meant for."""

    def kind(piece: Piece) -> tuple[int, int]:
        # Up to twice the rows, or few; up to four times the blocks.
        rows = max(piece.num_rows, FEW_ROWS)
        return (rows - 1).bit_length(), (_blocks(piece, block_size) - 1).bit_length() // 2

    groups = []
    for _, alike in groupby(sorted(pieces, key=kind), key=kind):
        members = list(alike)
        most = fit_pieces(_shape_of(members, block_size), block_size, width)
        groups += [members[at : at + most] for at in range(0, len(members), most)]
    return groups


def fit_pieces(shape: GroupShape, block_size: int, width: int) -> int:
    """Count the pieces of a group's shape that may attend together: one at least."""
    length = shape.num_blocks * block_size
    return max(1, min(MAX_GATHERED // (length * width), MAX_SCORES // (length * shape.num_rows)))


def fill(
    plan: PassPlan,
    step: HostStep,
    groups: Sequence[Sequence[Piece]],
    block_size: int,
    scratch: int | None = None,
) -> None:
    """Write a step into a plan on the host.

    The plan may be larger: rows beyond the step's are tokens 0 at positions 0 that write to the
    block `scratch`, pieces beyond a group's see nothing but their first position, and what comes
    of either nobody asks for.
    """
    num_rows = len(step.token_ids)
    counts = np.diff(step.starts)
    owners = np.repeat(np.arange(len(counts)), counts)  # [N]
    _put(plan.token_ids, step.token_ids)
    _put(plan.positions, step.positions)
    _put(plan.blocks, step.tables[owners, step.cache_places // block_size])
    _put(plan.offsets, step.cache_places % block_size)
    _put(plan.logit_rows, step.logit_rows)
    if num_rows < len(plan.token_ids):
        assert scratch is not None, "padding needs a block that nobody reads"
        plan.blocks.numpy()[num_rows:] = scratch
        plan.offsets.numpy()[num_rows:] = np.arange(len(plan.blocks) - num_rows) % block_size
    places = plan.places.numpy()
    places[:] = 0
    base = 0
    for group, pieces in zip(plan.groups, groups, strict=True):
        _fill_group(group, step, pieces, block_size, places, base)
        base += group.rows.numel()


def _fill_group(
    group: Group, step: HostStep, pieces: Sequence[Piece], block_size: int, places: Ids, base: int
) -> None:
    """Write a group's pieces, and its rows' places from `base` on."""
    most_rows, num_blocks = group.rows.shape[1], group.tables.shape[1]
    requests, firsts, counts, lengths = np.array(pieces, np.int64).reshape(-1, 4).T
    index = np.minimum(np.arange(most_rows), counts[:, None] - 1)  # [P, T]
    rows = firsts[:, None] + index
    places[rows] = base + np.arange(len(pieces))[:, None] * most_rows + index
    tables = np.zeros((len(pieces), num_blocks), np.int64)  # block 0 exists: it may be read
    known = step.tables[requests, :num_blocks]
    tables[:, : known.shape[1]] = known
    _put(group.rows, rows)
    _put(group.positions, step.positions[rows])
    _put(group.tables, tables)
    _put(group.lengths, lengths)
    group.lengths.numpy()[len(pieces) :] = 1  # a softmax needs something


def _put(part: Tensor, values: Ids) -> None:
    """Write values to the front of a part, zeros behind them."""
    array = part.numpy()
    array[: len(values)] = values
    array[len(values) :] = 0


def _blocks(piece: Piece, block_size: int) -> int:
    return -(-piece.length // block_size)


def _shape_of(pieces: Sequence[Piece], block_size: int) -> GroupShape:
    return GroupShape(
        num_pieces=len(pieces),
        num_rows=max(piece.num_rows for piece in pieces),
        num_blocks=max(_blocks(piece, block_size) for piece in pieces),
    )
