"""Weights in safetensors files: one, or the shards that an index names. Never a pickle."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelFileError, UnsupportedModel
from .fields import read_json

__all__ = ["SafetensorsWeights", "find_shards"]

SUPPORTED_DTYPES = ("F32", "F16", "BF16")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class _Entry:
    stored_name: str
    shard: Path
    dtype: str
    shape: tuple[int, ...]


def find_shards(folder: Path) -> dict[Path, list[str] | None]:
    """List a folder's weight files and the tensors that the index promises in each.

    Raises:
        UnsupportedModel: there are only pickled weights.
        ModelFileError: there are none, or a shard is missing.
    """
    if (folder / _INDEX).is_file():
        return _indexed_shards(folder)
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise UnsupportedModel(
            f"{folder}: weights only as {pickles[0]}, which is pickled code and never loaded here; "
            "convert it with transformers: save_pretrained(folder) writes model.safetensors"
        )
    raise ModelFileError(f"{folder}: no weights; expected {_SINGLE} or {_INDEX}")


def _indexed_shards(folder: Path) -> dict[Path, list[str] | None]:
    index = folder / _INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: 'weight_map' is missing or empty")
    shards: dict[Path, list[str] | None] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelFileError(f"{index}: {name} lies in {file_name!r}; expected a file name")
        promised = shards.setdefault(folder / file_name, [])
        assert promised is not None
        promised.append(name)
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise ModelFileError(
            f"{index}: names {len(shards)} shards, {len(missing)} missing: {', '.join(missing)}"
        )
    return shards


class SafetensorsWeights:
    """The tensors of a folder; files are mapped when first read and let go by `close`."""

    def __init__(self, folder: Path) -> None:
        self._entries: dict[str, _Entry] = {}
        self._open: dict[Path, Any] = {}
        self.shard_bytes: dict[str, int] = {}
        for shard, promised in find_shards(folder).items():
            self.shard_bytes[shard.name] = shard.stat().st_size
            self._add_shard(shard, promised)
        self._entries = _with_model_prefix(self._entries)

    def _add_shard(self, shard: Path, promised: list[str] | None) -> None:
        header = _read_header(shard)
        for name in header if promised is None else promised:
            if name not in header:
                raise ModelFileError(f"{shard}: tensor {name!r} is missing; {_INDEX} names it here")
            dtype, shape = header[name]
            if dtype not in SUPPORTED_DTYPES and not name.endswith("inv_freq"):
                raise UnsupportedModel(
                    f"{shard}: tensor {name!r} is {dtype}; supported: {', '.join(SUPPORTED_DTYPES)}"
                )
            self._entries[name] = _Entry(name, shard, dtype, shape)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        return self._entries[name].dtype

    def read(self, name: str) -> Tensor:
        entry = self._entries[name]
        try:
            if entry.shard not in self._open:
                self._open[entry.shard] = safe_open(entry.shard, framework="pt", device="cpu")
            tensor: Tensor = self._open[entry.shard].get_tensor(entry.stored_name)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{entry.shard}: cannot read {name!r}: {error}") from error
        return tensor

    def close(self) -> None:
        self._open = {}


def _with_model_prefix(entries: dict[str, _Entry]) -> dict[str, _Entry]:
    # A bare decoder, saved without its output head, drops the prefix from every name.
    if "embed_tokens.weight" not in entries:
        return entries
    return {
        name if name.startswith(("model.", "lm_head.")) else f"model.{name}": entry
        for name, entry in entries.items()
    }


def _read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read a file's table of dtypes and shapes, and hold its lengths against the file's size."""
    found = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise ModelFileError(f"{path}: no safetensors file ({found} bytes, header {length})")
        if 8 + length > found:
            raise ModelFileError(
                f"{path}: cut short: found {found} bytes, expected at least {8 + length}"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        expected = 8 + length + max(ends, default=0)
        table = {
            name: (str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))
            for name, entry in header.items()
        }
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelFileError(f"{path}: unreadable safetensors header: {error}") from error
    if expected != found:
        raise ModelFileError(
            f"{path}: found {found} bytes, expected {expected}; fetch the file again"
        )
    return table
