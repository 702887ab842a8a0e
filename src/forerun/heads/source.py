"""Where a head's tensors and configuration come from, before anybody has made sense of them.

`HeadFiles` reads a folder of safetensors files. `HeadSource` is what readers see, so that tensors
that are already in memory can be explained by the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelFileError, ModelNotFound, UnsupportedModel
from ..model.fields import read_json
from ..model.safetensors_folder import find_shards

__all__ = ["CONFIG", "PICKLES", "HeadFiles", "HeadSource", "some"]

CONFIG = "config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_INDEX = "model.safetensors.index.json"
_SHOWN = 4  # names in one message


class HeadSource(Protocol):
    """A head as its files have it: a configuration, and tensors under the names they came with."""

    @property
    def where(self) -> str:
        """Say what messages call it."""
        ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """Say how the file stores it: F32, BF16, I64, F8_E4M3, ..."""
        ...

    def read(self, name: str) -> Tensor: ...


class HeadFiles:
    """A folder with config.json and one or more safetensors files, which must not share names.

    Raises:
        ModelNotFound: there is no such folder.
        UnsupportedModel: there are only pickled weights.
        ModelFileError: a file is missing, cut short, or contradicts another.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        shards = _find_shards(folder)
        self.config: Mapping[str, Any] = _read_config(folder)
        self._open: dict[str, Any] = {}  # tensor name -> the opened file that holds it
        for shard in shards:
            self._add(shard)
        missing = [name for names in shards.values() for name in names if name not in self._open]
        if missing:
            raise ModelFileError(
                f"{folder}: {_INDEX} names {len(missing)} tensors that no file holds: "
                f"{some(missing)}"
            )

    def _add(self, shard: Path) -> None:
        try:
            opened: Any = safe_open(shard, framework="pt", device="cpu")
            names = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{shard}: no whole safetensors file: {error}") from error
        for name in names:
            if name in self._open:
                raise ModelFileError(f"{shard}: another file has a tensor {name!r} too")
            self._open[name] = opened

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._open)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._open[name].get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._open[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{self.where}: cannot read {name!r}: {error}") from error
        return tensor


def some(items: list[str] | frozenset[str] | set[str], separator: str = ", ") -> str:
    """List a few of many names in one line."""
    listed = list(items) if isinstance(items, list) else sorted(items)
    rest = len(listed) - _SHOWN
    return separator.join(listed[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ModelFileError(f"{path} is missing; a draft head needs the one it was published with")
    return read_json(path)


def _find_shards(folder: Path) -> dict[Path, list[str]]:
    if folder.is_file() and folder.suffix in PICKLES:
        raise _pickled(folder, folder.name)
    if not folder.is_dir():
        found = "a file" if folder.is_file() else "nothing there"
        raise ModelNotFound(
            f"{folder}: {found}; expected a folder with {CONFIG} and safetensors files"
        )
    if (folder / _INDEX).is_file():
        return {path: promised or [] for path, promised in find_shards(folder).items()}
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        return {path: [] for path in shards}
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise _pickled(folder, pickles[0])
    raise ModelFileError(f"{folder}: no weights; expected safetensors files")


def _pickled(path: Path, name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{path}: weights only as {name}, which is pickled and never loaded here; convert it once "
        f"with: forerun convert {path} --out FOLDER --model TARGET"
    )
