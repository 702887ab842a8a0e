"""forerun: a self-hosted language model answers sooner, and says the same.

from forerun import Engine, SamplingParams

with Engine.from_pretrained("smollm2-135m") as engine:
    (result,) = engine.generate("Once upon a time", SamplingParams(temperature=0))
    print(result.text, result.stats.mean_acceptance_length)
"""

from ._version import __version__
from .config import EngineConfig, SpeculationConfig
from .engine.engine import Chunk, Engine, GenerationResult
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
