"""forerun: a self-hosted language model answers sooner, and says the same.

from forerun import Engine, SamplingParams

with Engine.from_pretrained("smollm2-135m") as engine:
    (result,) = engine.generate("Once upon a time", SamplingParams(temperature=0))
    print(result.text, result.stats.mean_acceptance_length)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .config import EngineConfig, SpeculationConfig
    from .engine.engine import Engine
    from .engine.results import Chunk, GenerationResult
    from .engine.stats import RequestStats
    from .errors import ForerunError
    from .params import SamplingParams
    from .types import FinishReason

__all__ = [
    "Chunk",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "ForerunError",
    "GenerationResult",
    "RequestStats",
    "SamplingParams",
    "SpeculationConfig",
    "__version__",
]

# Loaded when first asked for: `forerun --help` must not wait for torch.
_HOMES = {
    "Chunk": "engine.engine",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "FinishReason": "types",
    "ForerunError": "errors",
    "GenerationResult": "engine.engine",
    "RequestStats": "engine.stats",
    "SamplingParams": "params",
    "SpeculationConfig": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
