"""`forerun certify`: prove for a model, a drafter and options that speculation changes nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from .loading import settings_of
from .options import EngineOptions, takes_groups
from .screen import err

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ..engine.engine import Prompt
    from ..measure.certify.certificate import Certificate

__all__ = ["certify"]

FAILED = 1  # exit code: something did not hold, or a control was not caught


@takes_groups
def certify(
    engine: EngineOptions,
    quick: Annotated[
        bool, typer.Option("--quick", help="About two minutes: fewer prompts, less power.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Everything: up to an hour, by machine and format.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='JSON lines with "prompt" or "turns", instead of our own prompts.',
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Where to write the certificate; .json is written beside it. Default: stdout.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check that drafts change nothing, for this model, this drafter and these options.

    Exact enumeration of the rules; equal tokens, greedy and seeded; the distribution of the live
    engine; and wrong rules that these checks must catch. Ends with 0 only if everything held.
    """
    if quick == full:
        raise ConfigError("say --quick or --full")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {out.parent}")
    from ..config import SpeculationConfig
    from ..measure.certify.run import PLANS
    from ..measure.certify.run import certify as run

    speculation = SpeculationConfig.from_dict(engine.speculation())
    if speculation.drafter == "none" or speculation.max_draft == 0:
        raise ConfigError("there is nothing to certify without a drafter; give --drafter")
    plan = PLANS["quick" if quick else "full"]
    chosen = _read_prompts(prompts)
    if len(chosen) < plan.num_prompts:
        raise ConfigError(f"--prompts holds {len(chosen)} prompts; {plan.num_prompts} are needed")
    with _Screen() as screen:
        certificate = run(
            engine.model, speculation, chosen, plan, _command(), screen, **settings_of(engine)
        )
    _write(certificate, out)
    for fault in certificate.faults:
        err.print(f"did not hold: {fault}", soft_wrap=True)
    if not certificate.holds:
        raise typer.Exit(FAILED)
    err.print("everything held, and every wrong rule was caught", soft_wrap=True)


def _write(certificate: Certificate, out: Path | None) -> None:
    from ..measure.certify.markdown import to_markdown

    page = to_markdown(certificate)
    data = json.dumps(certificate.to_dict(), indent=1, default=str, allow_nan=False)
    if out is None:
        print(page)
    else:
        out.write_text(page, encoding="utf-8")
        out.with_suffix(".json").write_text(data + "\n", encoding="utf-8")
        err.print(f"written: {out} and {out.with_suffix('.json')}", soft_wrap=True)


def _read_prompts(path: Path | None) -> list[Prompt]:
    if path is None:
        from ..measure.certify.prompts import CERTIFY_PROMPTS

        return [list(messages) for messages in CERTIFY_PROMPTS]
    from ..measure.prompts import read_prompts

    return [list(prompt.messages) for prompt in read_prompts(path)]


def _command() -> str:
    """What was typed, without the folders of this machine."""
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return " ".join(["forerun", *words])


class _Screen:
    """A bar for the part in progress on a terminal; plain lines elsewhere."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> _Screen:
        if err.is_terminal:
            from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

            columns: list[Any] = [*Progress.get_default_columns()]
            columns += [MofNCompleteColumn(), TimeElapsedColumn()]
            self._progress = Progress(*columns, console=err, transient=True)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, title: str, total: int | None) -> None:
        if self._progress is None:
            err.print(title if total is None else f"{title} ({total} answers)", soft_wrap=True)
            return
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(title, total=total)

    def advance(self) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task)
