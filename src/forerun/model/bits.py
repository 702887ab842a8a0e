"""Rows whose bits depend on nothing beside them: which row counts give that, found by trying.

A matrix product over more rows may add up in another order, so that a row's last bits change with
its company; greedy text then changes too, at the first near-tie. But libraries choose their order
by the number of rows. So each layer is tried: from `min_rows` to `max_rows` rows all give the same
bits. Fewer rows are padded, more are cut. Where `max_rows` is under what a step can hold, prompts
would be too slow in such small pieces; they have pieces of one fixed, padded size instead, which is
exact too: within one row count no library here lets a row's place matter.

What was found holds for these library versions on this processor, and was tried on random numbers:
evidence, not proof.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..device import cpu_name
from ..home import forerun_home
from .linear import Linear, pack_linear

__all__ = ["PROMPT_PIECE", "ExactRows", "PaddedLinear", "Shape", "in_pieces", "try_rows"]

logger = logging.getLogger(__name__)

PROMPT_PIECE = 128  # rows of a prompt's piece: smaller is slower, larger pads more
MIN_ROWS = (1, 2, 4)  # the fewest rows that a class may begin with
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 96, 128, 192, 256)
SAMPLED_ROWS = (0, 1, 2, 3, 6, 7, 14, 15, 30, 31, 32, 63, 127, 255)
WORKING_SET_BYTES = 96 << 20  # weights that a timing goes through: more than caches hold
MAX_COPIES = 24
NUM_TIMINGS = 40

Shape = tuple[int, int]  # (inputs, outputs) of a linear layer


@dataclass(frozen=True, slots=True)
class ExactRows:
    """What keeps the bits of rows equal, and what it costs."""

    min_rows: tuple[tuple[Shape, int], ...]  # by shape of layer: fewer rows are padded to it
    max_rows: int  # more rows are cut into pieces of at most so many
    place_matters: bool  # whether bits depend on a row's place in a full piece: then nothing helps
    cost: float  # time of the layers over one row, padded against as it is

    def pad(self, shape: Shape, linear: Linear) -> Linear:
        """Have a layer of this shape never see too few rows."""
        fewest = dict(self.min_rows)[shape]
        return linear if fewest == 1 else PaddedLinear(linear, fewest)


class PaddedLinear:
    """A linear layer that is never given fewer than `min_rows` rows."""

    def __init__(self, linear: Linear, min_rows: int) -> None:
        self._linear = linear
        self._min_rows = min_rows

    def __call__(self, x: Tensor) -> Tensor:
        return _padded(self._linear, x, max(self._min_rows, len(x)))


def in_pieces(linear: Linear, x: Tensor, num_fine: int, max_rows: int) -> Tensor:
    """Run a layer over x [N, in]: its first `num_fine` rows in pieces of at most `max_rows`.

    The rest are prompts' and go in pieces of exactly PROMPT_PIECE rows, the last one padded.
    """
    fine = [linear(piece) for piece in x[:num_fine].split(max_rows) if len(piece)]
    bulk = [
        _padded(linear, piece, PROMPT_PIECE)
        for piece in x[num_fine:].split(PROMPT_PIECE)
        if len(piece)
    ]
    parts = fine + bulk
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _padded(linear: Linear, x: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - len(x)
    if missing <= 0:
        return linear(x)
    return linear(torch.cat([x, x.new_zeros(missing, x.shape[1])]))[: len(x)]


def try_rows(shapes: Sequence[Shape], dtype: torch.dtype, most_rows: int) -> ExactRows:
    """Find the row counts of equal bits for layers of these shapes; tried once per machine.

    `shapes` names every layer of a pass, those of equal shape as often as they occur;
    `most_rows` is what a step can hold.
    """
    file = _cache_file(shapes, dtype, most_rows)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return _read(file)
    logger.info("trying which row counts give equal bits (once per machine) ...")
    found = _try_all(sorted(set(shapes)), list(shapes), dtype, most_rows)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(".part")
        fresh.write_text(json.dumps(asdict(found)))
        fresh.replace(file)
    return found


def find_class(linear: Linear, x: Tensor) -> tuple[int, int]:
    """Say from how many to how many of the rows x [most, in] give the same bits: (fewest, most).

    Of several classes the one that reaches furthest; of those the one that begins first.
    """
    most = len(x)
    counts = [count for count in (*COUNTS, most) if count <= most]
    best = (1, 1)
    for fewest in MIN_ROWS:
        if fewest > most or best[1] == most:
            break
        # What some rows are in the smallest calls that may hold them, always in the first place.
        alone = {
            row: linear(torch.cat([x[row : row + 1], x[: fewest - 1]]))[0]
            for row in (*SAMPLED_ROWS, most - 1)
            if row < most
        }
        reached = 0
        for count in [count for count in counts if count >= fewest]:
            result = linear(x[:count])
            if not all(torch.equal(result[row], alone[row]) for row in alone if row < count):
                break
            reached = count
        if reached > best[1]:
            best = (fewest, reached)
    return best


def _try_all(
    distinct: Sequence[Shape], shapes: Sequence[Shape], dtype: torch.dtype, most_rows: int
) -> ExactRows:
    dice = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=dice).to(dtype)

    fewest: dict[Shape, int] = {}
    reached, place_matters, usual_s, padded_s = most_rows, False, 0.0, 0.0
    with torch.inference_mode():
        for shape in distinct:
            num_inputs, num_outputs = shape
            weight = random(num_outputs, num_inputs) * num_inputs**-0.5
            linear = pack_linear(weight)
            x = random(max(most_rows, PROMPT_PIECE), num_inputs)
            fewest[shape], most = find_class(linear, x[:most_rows])
            reached = min(reached, most)
            piece = x[:PROMPT_PIECE]
            moved = linear(piece.roll(7, 0)).roll(-7, 0)
            place_matters |= not torch.equal(moved, linear(piece))
            usual, padded = _time_padding(weight, x[:1], fewest[shape])
            usual_s += usual * shapes.count(shape)
            padded_s += padded * shapes.count(shape)
    return ExactRows(
        min_rows=tuple(fewest.items()),
        max_rows=reached,
        place_matters=place_matters,
        cost=padded_s / usual_s,
    )


def _time_padding(weight: Tensor, x: Tensor, fewest: int) -> tuple[float, float]:
    """Time a layer over one row as it is and padded, interleaved: seconds a call, the least.

    (The least, since what else runs can only add.) Weights come from memory as in a pass, so there
    are more copies than caches hold.
    """
    size = weight.numel() * weight.element_size()
    copies = min(MAX_COPIES, max(1, WORKING_SET_BYTES // size))
    usual = [pack_linear(weight) for _ in range(copies)]
    padded = usual if fewest == 1 else [PaddedLinear(linear, fewest) for linear in usual]

    def seconds(layers: Sequence[Callable[[Tensor], Tensor]]) -> float:
        begin = time.perf_counter()
        for layer in layers:
            layer(x)
        return (time.perf_counter() - begin) / len(layers)

    pairs = [(seconds(usual), seconds(padded)) for _ in range(NUM_TIMINGS)][1:]
    if fewest == 1:
        pairs = [(usual_s, usual_s) for usual_s, _ in pairs]
    return min(a for a, _ in pairs), min(b for _, b in pairs)


def _cache_file(shapes: Sequence[Shape], dtype: torch.dtype, most_rows: int) -> Path:
    """Name the file of a finding by everything that it depends on, this code included."""
    parts = [
        cpu_name(),
        torch.__version__,
        torch.__config__.show(),
        str(torch.get_num_threads()),
        str(dtype),
        str(sorted(shapes)),
        str(most_rows),
        Path(__file__).read_text(),
    ]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return forerun_home() / "bits" / f"{digest[:16]}.json"


def _read(file: Path) -> ExactRows:
    data = json.loads(file.read_text())
    return ExactRows(
        min_rows=tuple(((int(a), int(b)), int(fewest)) for (a, b), fewest in data["min_rows"]),
        max_rows=int(data["max_rows"]),
        place_matters=bool(data["place_matters"]),
        cost=float(data["cost"]),
    )
