"""What rows are made with: what must stay the same when a run goes on, and what is told."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..device import cpu_name
from ..engine.engine import Engine
from ..registry import resolve_model

__all__ = ["identity_of", "surroundings_of"]

FORMAT = 1  # raised when the same settings would give other rows
WEIGHTS = (".safetensors", ".gguf")
SMALL_FILES = ("config.json", "tokenizer.json")
HEAD_BYTES = 1 << 20


def identity_of(
    engine: Engine, model: str, settings: Mapping[str, Any], data: str | None
) -> dict[str, Any]:
    """Say what decides over the rows. `data` is the digest of the user's prompts."""
    template = engine.codec.chat_source or ""
    return {
        **settings,
        "model": _fingerprint(resolve_model(model)),
        "quantize": engine.config.quantize,
        "max_model_len": engine.max_model_len,
        "chat_template": hashlib.sha256(template.encode()).hexdigest()[:16],
        "data": data,
        "format": FORMAT,
    }


def surroundings_of(engine: Engine, model: str) -> dict[str, Any]:
    """Say what else may explain a row. Rounding differs between processors and libraries."""
    machinery = engine.machinery
    return {
        "model_name": model,
        "forerun": __version__,
        "torch": torch.__version__,
        "processor": cpu_name(),
        "device": str(machinery.device),
        "dtype": str(machinery.dtype).removeprefix("torch."),
        "kernels": machinery.kernels,
        "exact_bits": machinery.exact_bits.enabled,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _fingerprint(path: Path) -> str:
    """Tell models apart without reading all of their weights: by sizes and how files begin."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        if file.suffix in WEIGHTS or file.name in SMALL_FILES:
            with file.open("rb") as opened:
                digest.update(f"{file.stat().st_size} ".encode() + opened.read(HEAD_BYTES))
    return digest.hexdigest()[:16]
