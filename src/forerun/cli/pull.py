"""`forerun pull`: fetch a known model, or list what is known and what is here."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .screen import err, is_terminal, out

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ..registry import PullProgress

__all__ = ["pull", "pull_with_progress"]

STAGES = {
    "download": "downloading",
    "check": "checking",
    "convert": "converting",
    "write": "writing",
}


def pull(
    name: Annotated[
        str | None, typer.Argument(help="A known model; none lists them.", show_default=False)
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the known models and the pulled ones.")
    ] = False,
) -> None:
    """Fetch a known model, checked by its hash."""
    if name is None or list_:
        _list_all()
        return
    from ..registry import list_models

    here = name in {each.name for each in list_models()}
    begin_s = time.perf_counter()
    path = pull_with_progress(name)
    took = "it was here already" if here else f"{time.perf_counter() - begin_s:.1f} s"
    out.print(f"{name} is at {path} ({took})", soft_wrap=True)


def pull_with_progress(name: str) -> Path:
    """Pull a model while a bar on stderr says how far it is; lines per stage off a terminal."""
    from .. import registry

    if not is_terminal(sys.stderr):
        return registry.pull(name, report=_StageLines())
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err) as progress:
        return registry.pull(name, report=_Bars(progress))


class _Bars:
    """One bar per stage, in the order in which they come."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, state: PullProgress) -> None:
        if state.stage not in self._tasks:
            self._finish_all()
            words = STAGES.get(state.stage, state.stage)
            self._tasks[state.stage] = self._progress.add_task(f"{words:<12}", amount="")
        self._progress.update(
            self._tasks[state.stage],
            total=max(1, state.total),
            completed=state.done,
            amount=_amount(state),
        )

    def _finish_all(self) -> None:
        for task in self._progress.tasks:
            self._progress.update(task.id, completed=task.total)
            self._progress.stop_task(task.id)


class _StageLines:
    """One line per stage, for a log."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, state: PullProgress) -> None:
        if state.stage != self._stage:
            self._stage = state.stage
            err.print(f"{STAGES.get(state.stage, state.stage)} ...")


def _amount(state: PullProgress) -> str:
    if state.stage == "convert":
        return f"{state.done} of {state.total} tensors"
    return f"{state.done / 1e6:.0f} of {state.total / 1e6:.0f} MB"


def _list_all() -> None:
    from ..registry import KNOWN, forerun_home, list_models

    pulled = {each.name: each for each in list_models()}
    for name in sorted({*KNOWN, *pulled}):
        if name in pulled:
            model = pulled[name]
            line = f"{name}  pulled, {model.size_bytes / 1e6:.0f} MB in {model.path}"
        else:
            line = f"{name}  not here yet; fetch it with: forerun pull {name}"
        out.print(line, soft_wrap=True)
    if not pulled:
        out.print(f"Models are kept in {forerun_home() / 'models'}.", soft_wrap=True)
