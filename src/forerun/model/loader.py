"""Open a model on disk: a folder in Hugging Face layout, or one `.gguf` file.

Opening reads headers and the tokenizer, no weights. Nothing here is ever unpickled or executed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import ModelFileError, ModelNotFound
from .arch import ModelConfig, expected_shapes
from .fields import read_json
from .gguf import GgufFile, GgufWeights, read_config
from .gguf_tokenizer import read_tokenizer
from .safetensors_folder import SafetensorsWeights
from .tokenizer import TokenizerSpec, read_tokenizer_folder
from .weights import WeightSource, check_complete

__all__ = [
    "ModelFiles",
    "TokenizerSpec",
    "WeightSource",
    "check_complete",
    "expected_shapes",
    "open_model",
]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """An opened model: its shape, its tokenizer, and a source to read its weights from."""

    path: Path
    config: ModelConfig
    weights: WeightSource
    tokenizer: TokenizerSpec
    file_bytes: dict[str, int]  # size of each weight file

    def fingerprint(self) -> str:
        """Hash what tells models apart without reading weights: shape, tensors, file sizes."""
        weights = self.weights
        tensors = [
            [name, weights.dtype(name), list(weights.shape(name))] for name in sorted(weights.names)
        ]
        told = [asdict(self.config), tensors, sorted(self.file_bytes.items())]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def open_model(path: Path) -> ModelFiles:
    """Open the model at `path` and check that it is complete.

    Raises:
        ModelNotFound: there is nothing at `path`, or nothing of either kind.
        ModelFileError: a file is missing, cut short, or contradicts another.
        UnsupportedModel: the files are sound, but nothing here can run them.
    """
    if path.is_dir():
        return _open_folder(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _open_gguf(path)
    found = "a file of another kind" if path.exists() else "nothing there"
    raise ModelNotFound(f"{path}: {found}; expected a folder with config.json, or a .gguf file")


def _open_folder(folder: Path) -> ModelFiles:
    config_path = folder / "config.json"
    if not config_path.is_file():
        files = sorted(folder.glob("*.gguf"))
        hint = f"; did you mean {files[0]}?" if files else "; expected a Hugging Face folder"
        raise ModelFileError(f"{config_path} is missing{hint}")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else None
    config = ModelConfig.from_hf(read_json(config_path), generation)
    weights = SafetensorsWeights(folder)
    check_complete(weights, config, folder)
    tokenizer = read_tokenizer_folder(folder)
    return ModelFiles(folder, config, weights, tokenizer, weights.shard_bytes)


def _open_gguf(path: Path) -> ModelFiles:
    file = GgufFile(path)
    config = read_config(file)
    weights = GgufWeights(file, config)
    check_complete(weights, config, path)
    tokenizer = read_tokenizer(file)
    return ModelFiles(path, config, weights, tokenizer, {path.name: path.stat().st_size})
