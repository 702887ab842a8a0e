"""From options to an engine, with a sign of life while it loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .options import EngineOptions
from .screen import spinner

if TYPE_CHECKING:
    from ..draft.base import Drafter
    from ..engine.engine import Engine

__all__ = ["open_engine"]


def open_engine(options: EngineOptions, *, drafter: Drafter | None = None, **more: Any) -> Engine:
    """Load what the options name; `drafter` stands in for theirs, `more` are engine options."""
    speculation = options.speculation()
    with spinner(f"loading {options.model} ..."):
        from ..engine.engine import Engine

        return Engine.from_pretrained(
            options.model,
            drafter="auto" if drafter is None else drafter,
            speculation=speculation,
            device=options.device,
            dtype=options.dtype,
            kernels=options.kernels,
            max_model_len=options.max_model_len,
            num_threads=options.threads,
            **more,
        )
