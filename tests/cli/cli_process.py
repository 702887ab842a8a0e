"""The program as tests run it, and where its model lies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forerun.registry import forerun_home

__all__ = ["MODEL", "Cli", "Ended", "command", "model_folder"]

MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Ended:
    """What a run of the program left."""

    code: int
    stdout: str
    stderr: str


# Takes the arguments of a command line, and where it can, `stdin`.
Cli = Callable[..., Ended]


def command(*arguments: str) -> list[str]:
    """The program as a process of its own."""
    return [sys.executable, "-m", "forerun", *arguments]


def model_folder() -> Path:
    """Where the pulled model is, or would be."""
    return forerun_home() / "models" / MODEL
