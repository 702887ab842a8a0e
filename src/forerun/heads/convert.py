"""Turn a published head's `.pt` and `.bin` files into safetensors, offline and once.

This is the only place in the project that unpickles anything, and it does so with
`weights_only=True`: a file that holds more than tensors and plain containers is refused. Nothing
but the command line imports it. Tensors keep their names and config.json its fields, so that a
converted head is the published one in every layout; `open_head` makes sense of either.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import ModelFileError, ModelNotFound
from ..model.arch import ModelConfig
from ..model.fields import read_json
from .config import Head
from .kinds import plain_name
from .loader import read_head
from .source import CONFIG, PICKLES, HeadSource, some
from .writer import write_folder

__all__ = ["Conversion", "convert_head", "read_any"]

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_TRAINING = ("training_state", "optimizer", "scheduler", "rng_state", "training_args")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_SAFE = ".safetensors"
# What reading a file that is cut short or something else ends in, by where it goes wrong.
_DAMAGE = (OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError)
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a source turned out to be, and what was read to find out."""

    head: Head
    files: tuple[str, ...]


def convert_head(source: Path, folder: Path | None, target: ModelConfig) -> Conversion:
    """Read a head from any kind of file, check it for `target`, and write it to `folder`.

    With no folder it is only read and checked.

    Raises:
        ModelNotFound: there is nothing at `source`.
        ModelFileError: a file is damaged, holds code, or contradicts another.
        UnsupportedModel: another kind of head, or a head for another target.
        ConfigError: `folder` is there already, or cannot be written.
    """
    found, files = read_any(source)
    head = read_head(found, target)
    if folder is not None:
        # Tensors that share memory, as Medusa's repeated blocks do, are written out each.
        tensors = {name: found.read(name).clone().contiguous() for name in sorted(found.names)}
        write_folder(folder, found.config, tensors)
    return Conversion(head, files)


def read_any(source: Path) -> tuple[HeadSource, tuple[str, ...]]:
    """Read safetensors, `.bin` or `.pt` files, and say which; raises what `convert_head` does."""
    if not source.exists():
        raise ModelNotFound(
            f"{source}: nothing there; expected a folder with {CONFIG}, or a file beside it"
        )
    folder = source if source.is_dir() else source.parent
    files = [source] if source.is_file() else _weight_files(source)
    tensors: dict[str, Tensor] = {}
    for path in files:
        loaded = _load_safe(path) if path.suffix == _SAFE else _load_pickle(path)
        twice = sorted(tensors.keys() & loaded.keys())
        if twice:
            raise ModelFileError(f"{path}: another file has {some(twice)} too")
        tensors |= loaded
    config_path = folder / CONFIG
    config = read_json(config_path) if config_path.is_file() else _config_of(tensors, folder)
    return _Loaded(str(source), config, tensors), tuple(path.name for path in files)


def _weight_files(folder: Path) -> list[Path]:
    """Choose safetensors where there are some, else the pickles, shards or one."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    safe = [path for path in paths if path.suffix == _SAFE]
    if safe:
        return safe
    pickles = [
        path for path in paths if path.suffix in PICKLES and not path.name.startswith(_TRAINING)
    ]
    if not pickles:
        raise ModelFileError(
            f"{folder}: no weights; expected .safetensors, .bin or .pt files of a head"
        )
    return pickles


def _load_safe(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path}: no whole safetensors file: {_first_line(error)}") from error


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old formats; what matters is refused below
            value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Its own text goes on to say how to run the code all the same.
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        if asked is None:
            raise ModelFileError(f"{path}: no file of tensors") from error
        raise ModelFileError(
            f"{path}: asks for {asked[1]} besides tensors, which may be code, and is not read; "
            "have its author save the tensors alone, best as safetensors"
        ) from error
    except _DAMAGE as error:
        raise ModelFileError(f"{path}: no whole file of tensors: {_first_line(error)}") from error
    for wrapper in _WRAPPERS:
        inner = value.get(wrapper) if isinstance(value, Mapping) else None
        if isinstance(inner, Mapping):
            value = inner
    if not isinstance(value, Mapping):
        raise ModelFileError(f"{path}: holds a {type(value).__name__}, expected tensors by name")
    tensors = {str(name): each for name, each in value.items() if isinstance(each, Tensor)}
    if not tensors or any(each.layout != torch.strided for each in tensors.values()):
        raise ModelFileError(f"{path}: holds no tensors by name, or sparse ones")
    return {name: each.detach() for name, each in tensors.items()}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def _config_of(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Any]:
    """Make the configuration of Medusa heads, which say all of it themselves."""
    blocks = [match for name in tensors if (match := _BLOCK.fullmatch(plain_name(name)))]
    if not blocks:
        raise ModelFileError(
            f"{folder / CONFIG} is missing; only Medusa heads can do without: fetch the one that "
            "was published with the head"
        )
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": 1 + max(int(match[1]) for match in blocks),
        "medusa_num_layers": 1 + max(int(match[2]) for match in blocks),
    }


class _Loaded:
    """Tensors in memory, as `read_head` wants to see them."""

    def __init__(
        self, where: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        self.where = where
        self.config = config
        self._tensors = tensors

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        dtype = self._tensors[name].dtype
        return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))

    def read(self, name: str) -> Tensor:
        return self._tensors[name]
