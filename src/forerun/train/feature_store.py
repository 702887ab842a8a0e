"""Hidden states on disk: flat files that grow row by row, and an index that says what is whole.

    meta.json     what made them: another model, or other layers, are refused
    index.jsonl   a line for each row: its id, and where its positions and labels begin
    final.bin     [positions, E] float16: behind the final norm, so never large
    layer_L.bin   [positions, E] bfloat16: the residual stream, whose outliers float16 may not hold
    log_sums.bin  [labels] float32, tops.bin [labels] int32: of the target's logits, for each token
                  of an answer; with the final states they give the target's probabilities

The index is written last. What lies behind its last line is cut when a killed run goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError

__all__ = ["FeatureStore", "RowFeatures", "bytes_per_position"]

META, INDEX = "meta.json", "index.jsonl"
FORMAT = 1
STATE_BYTES = 2
LABEL_BYTES = 4


@dataclass(frozen=True, slots=True)
class RowFeatures:
    """What the target thought at every position of a row of n tokens, `a` of them the answer."""

    final: Tensor  # [n, E] float16
    layers: Mapping[int, Tensor]  # [n, E] bfloat16
    log_sums: Tensor  # [a] float32: log of the sum of exp(logits) that each answer token came from
    tops: Tensor  # [a] int64: the likeliest token there


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row's features lie."""

    id: int
    start: int
    length: int
    label_start: int
    num_labels: int


class FeatureStore:
    """Features of the rows of one folder, of one target, of some of its layers."""

    def __init__(
        self, folder: Path, *, fingerprint: str, hidden_size: int, layers: Sequence[int]
    ) -> None:
        """Open the folder, or begin it.

        Raises:
            ConfigError: it holds features of something else.
        """
        self.layers = tuple(layers)
        self._folder, self._size = folder, hidden_size
        folder.mkdir(parents=True, exist_ok=True)
        _keep_meta(
            folder / META,
            {
                "format": FORMAT,
                "target": fingerprint,
                "hidden_size": hidden_size,
                "layers": list(layers),
            },
        )
        self._places = {place.id: place for place in _read_index(folder / INDEX)}
        self._cut_torn()

    def __contains__(self, row_id: int) -> bool:
        return row_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_positions(self) -> int:
        return sum(place.length for place in self._places.values())

    def add(self, row_ids: Sequence[int], features: Sequence[RowFeatures]) -> None:
        """Append rows and return once they are on the disk."""
        ends = self._ends()
        lines = []
        for row_id, row in zip(row_ids, features, strict=True):
            place = _Place(row_id, ends[0], len(row.final), ends[1], len(row.tops))
            ends = (ends[0] + place.length, ends[1] + place.num_labels)
            self._places[row_id] = place
            lines.append(json.dumps([row_id, place.length, place.num_labels]) + "\n")
        self._append("final", [row.final for row in features], torch.float16)
        for layer in self.layers:
            self._append(f"layer_{layer}", [row.layers[layer] for row in features], torch.bfloat16)
        self._append("log_sums", [row.log_sums for row in features], torch.float32)
        self._append("tops", [row.tops for row in features], torch.int32)
        with (self._folder / INDEX).open("a", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())

    def read(self, row_id: int) -> RowFeatures:
        """Read a row's features."""
        place = self._places[row_id]
        states = slice(place.start, place.start + place.length)
        labels = slice(place.label_start, place.label_start + place.num_labels)
        return RowFeatures(
            final=self._read("final", torch.float16, states),
            layers={
                layer: self._read(f"layer_{layer}", torch.bfloat16, states) for layer in self.layers
            },
            log_sums=self._read("log_sums", torch.float32, labels),
            tops=self._read("tops", torch.int32, labels).long(),
        )

    def _ends(self) -> tuple[int, int]:
        """Say how many positions and labels are there."""
        places = self._places.values()
        return sum(each.length for each in places), sum(each.num_labels for each in places)

    def _append(self, name: str, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
        bits = torch.int16 if dtype.itemsize == STATE_BYTES else dtype
        with self._path(name).open("ab") as file:
            for part in parts:
                file.write(part.to(dtype).contiguous().view(bits).numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())

    def _read(self, name: str, dtype: torch.dtype, part: slice) -> Tensor:
        wide = dtype.itemsize == STATE_BYTES
        width = self._size if wide else 1
        stored = np.dtype(np.int16 if wide else np.int32)
        with self._path(name).open("rb") as file:
            file.seek(part.start * width * stored.itemsize)
            bits = np.fromfile(file, stored, (part.stop - part.start) * width)
        values = torch.from_numpy(bits).view(dtype)
        return values.view(-1, self._size) if wide else values

    def _cut_torn(self) -> None:
        """Cut what was written of rows that the index does not hold."""
        positions, labels = self._ends()
        sizes = {name: positions * self._size * STATE_BYTES for name in self._state_names()}
        sizes |= dict.fromkeys(("log_sums", "tops"), labels * LABEL_BYTES)
        for name, size in sizes.items():
            path = self._path(name)
            there = path.stat().st_size if path.exists() else 0
            if there < size:
                raise ConfigError(
                    f"{path} has {there} bytes, its index promises {size}; remove {self._folder} "
                    "to compute it again"
                )
            if there > size:
                os.truncate(path, size)

    def _state_names(self) -> list[str]:
        return ["final", *(f"layer_{layer}" for layer in self.layers)]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.bin"


def bytes_per_position(hidden_size: int, layers: Sequence[int]) -> int:
    """Say what a position costs on disk."""
    return (1 + len(layers)) * hidden_size * STATE_BYTES


def _read_index(path: Path) -> list[_Place]:
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        os.truncate(path, len(whole))
    places, start, label_start = [], 0, 0
    for line in whole.splitlines():
        row_id, length, num_labels = json.loads(line)
        places.append(_Place(row_id, start, length, label_start, num_labels))
        start, label_start = start + length, label_start + num_labels
    return places


def _keep_meta(path: Path, meta: Mapping[str, object]) -> None:
    if not path.exists():
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(meta) + "\n")
        beside.replace(path)
        return
    known = json.loads(path.read_text())
    if known != meta:
        raise ConfigError(
            f"{path.parent} holds features of another model or kind ({known} against {meta}); "
            "remove it, or name another folder"
        )
