"""A run on disk: everything that the next step depends on, in one file, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ConfigError
from ..model.writer import sync_path
from .evaluate import Acceptance

__all__ = ["FILE", "Judgement", "RunState", "load_run", "save_run"]

FILE = "run.safetensors"


@dataclass(frozen=True, slots=True)
class Judgement:
    """One evaluation, and where in the run it was."""

    step: int
    num_tokens: int  # looks learnt from so far
    loss: float  # a mean since the last one
    acceptance: Acceptance


@dataclass(slots=True)
class RunState:
    """How far a run is. What it will do follows from this and its settings."""

    epoch: int = 0
    batch: int = 0  # of the epoch, the next one
    step: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    loss_sum: float = 0.0  # since the last evaluation
    loss_count: int = 0
    history: list[Judgement] = field(default_factory=list)

    @property
    def best(self) -> Judgement | None:
        return max(self.history, key=lambda each: each.acceptance.score, default=None)


def save_run(
    folder: Path, state: RunState, identity: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a checkpoint in place of the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    beside = path.with_suffix(".new")
    told = json.dumps({"state": dataclasses.asdict(state), "identity": identity})
    save_file({k: v.contiguous() for k, v in tensors.items()}, beside, metadata={"run": told})
    sync_path(beside)
    beside.replace(path)
    sync_path(folder)


def load_run(
    folder: Path, identity: Mapping[str, Any]
) -> tuple[RunState, dict[str, Tensor]] | None:
    """Read the checkpoint of a run with the same settings; None: there is none.

    Raises:
        ConfigError: it cannot be read, or belongs to a run with other settings.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            told = json.loads(file.metadata()["run"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # noqa: BLE001  (its library has no error of its own)
        raise ConfigError(f"{path} cannot be read ({error}); remove it to begin anew") from None
    known, asked = told["identity"], json.loads(json.dumps(identity))
    changed = [
        f"{name} was {known.get(name)!r}, is {asked.get(name)!r}"
        for name in sorted({*known, *asked})
        if known.get(name) != asked.get(name)
    ]
    if changed:
        raise ConfigError(
            f"{folder} holds a run with other settings ({'; '.join(changed)}); repeat those, "
            "remove it, or name another folder"
        )
    return _read_state(told["state"]), tensors


def _read_state(told: dict[str, Any]) -> RunState:
    history = [
        Judgement(**{**each, "acceptance": Acceptance(**_tuples(each["acceptance"]))})
        for each in told.pop("history")
    ]
    return RunState(**told, history=history)


def _tuples(told: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(each) if isinstance(each, list) else each for key, each in told.items()}
