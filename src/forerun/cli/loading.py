"""From options to an engine, with a sign of life while it loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .options import EngineOptions
from .screen import spinner

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..measure.switch import SwitchedDrafter

__all__ = ["open_engine", "open_switched_engine", "settings_of"]


def open_engine(options: EngineOptions) -> Engine:
    """Load what the options name."""
    speculation = options.speculation()
    with spinner(f"loading {options.model} (a first start compiles for some 20 s) ..."):
        from ..engine.engine import Engine

        return Engine.from_pretrained(
            options.model, speculation=speculation, **settings_of(options)
        )


def open_switched_engine(options: EngineOptions) -> tuple[Engine, SwitchedDrafter]:
    """Load what the options name, with a drafter that can be switched on and off."""
    speculation = options.speculation()
    with spinner(f"loading {options.model} (a first start compiles for some 20 s) ..."):
        from ..config import SpeculationConfig
        from ..measure.switch import switched_engine

        config = SpeculationConfig.from_dict(speculation)
        return switched_engine(options.model, config, **settings_of(options))


def settings_of(options: EngineOptions) -> dict[str, Any]:
    """List the options that are fields of `EngineConfig`."""
    return {
        "device": options.device,
        "dtype": options.dtype,
        "exact_bits": options.exact_bits,
        "kernels": options.kernels,
        "quantize": options.quantize,
        "max_model_len": options.max_model_len,
        "num_threads": options.threads,
    }
