"""`forerun train`: from a model to a draft head for it, in one command that can be interrupted."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, DependencyMissing
from .options import option
from .screen import err, is_terminal, out, printable, say_note

if TYPE_CHECKING:
    from ..train.recipes import Recipe

__all__ = ["train"]

DATA_CONTEXT = 1024  # of prompt and answer; long enough for both, and cheap
AT_ONCE = 64
DEFAULT_TOKENS = 1_000_000
QUIET_LINES_S = 10.0


def train(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="eagle, eagle3 or medusa.", show_default=False)
    ],
    model: Annotated[
        str,
        option("--model", "-m", metavar="MODEL", help="A pulled name, a folder, or a .gguf file."),
    ],
    folder: Annotated[Path, option("--out", metavar="DIR", help="The head's folder, a new one.")],
    data: Annotated[
        Path | None,
        option(
            "--data",
            metavar="FILE",
            help='JSON lines with "prompt" or "messages", which the model answers. Default: it '
            "writes its own prompts.",
        ),
    ] = None,
    rows: Annotated[
        Path | None,
        option(
            "--rows",
            metavar="DIR",
            help="The folder of answered prompts. If it is there and --data is not given, no more "
            "are made. Default: DIR.rows beside the head.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        option("--tokens", metavar="N", help="Answer tokens to learn from. Default: 1000000."),
    ] = None,
    hours: Annotated[
        float | None, option("--hours", metavar="H", help="The longest time to train, after data.")
    ] = None,
    epochs: Annotated[
        float, option("--epochs", metavar="N", help="Rounds over the data. Default: 4.")
    ] = 4.0,
    resume: Annotated[
        Path | None,
        option("--resume", metavar="HEAD", help="A head that goes on learning, on this data."),
    ] = None,
    draft_vocab: Annotated[
        int,
        option("--draft-vocab", metavar="D", help="Tokens that the head can draft. Default: 8192."),
    ] = 8192,
    loss: Annotated[
        str | None,
        option("--loss", metavar="NAME", help="cross-entropy or acceptance. Default: the first."),
    ] = None,
    learning_rate: Annotated[
        float | None, option("--learning-rate", metavar="X", help="Default: by kind.")
    ] = None,
    batch_tokens: Annotated[
        int | None, option("--batch-tokens", metavar="N", help="Tokens of a step. Default: 512.")
    ] = None,
    threads: Annotated[
        int | None, option("--threads", metavar="N", help="Default: all processors at hand.")
    ] = None,
    seed: Annotated[int, option("--seed", metavar="N", help="Default: 0.")] = 0,
) -> None:
    """Train a draft head on the model's own answers; the same command goes on after a break."""
    from ..train.recipes import KINDS

    if kind not in KINDS:
        raise ConfigError(f"KIND is {kind!r}; known: {', '.join(KINDS)}")
    given: dict[str, Any] = {"loss": loss, "learning_rate": learning_rate}
    given["batch_tokens"] = batch_tokens
    recipe = _recipe(kind, seed, given)
    from ..train.make_head import check_out, run_folder, train_head

    check_out(folder)
    where = rows or folder.with_name(f"{folder.name}.rows")
    if rows is None or data is not None or not where.exists():
        _make_rows(model, where, tokens or DEFAULT_TOKENS, data, seed)
    from ..train.curves import draw_curves
    from ..train.loop import Limits
    from ..train.make_head import HeadReport
    from ..train.target import load_target
    from ..train.wording import describe_end, describe_features, describe_training

    target = load_target(model, num_threads=threads)
    with _live() as say:
        done = train_head(
            target,
            where,
            folder,
            recipe,
            Limits(epochs=epochs, hours=hours),
            draft_vocab_size=draft_vocab,
            num_tokens=tokens,
            resume=resume,
            command=_command(
                kind,
                {
                    "model": model,
                    "out": folder,
                    "data": data,
                    "rows": rows,
                    "tokens": tokens,
                    "hours": hours,
                    "epochs": epochs,
                    "resume": resume,
                    "draft-vocab": draft_vocab,
                    "loss": loss,
                    "learning-rate": learning_rate,
                    "batch-tokens": batch_tokens,
                    "threads": threads,
                    "seed": seed,
                },
            ),
            report=HeadReport(
                features=lambda each: say(describe_features(each), each.tokens_per_s is None),
                training=lambda each: say(describe_training(each), each.judgement is not None),
                note=lambda line: say(line, True),
            ),
        )
    _say(describe_end(done))
    try:
        draw_curves(done.history, folder / "curves.png")
    except DependencyMissing as error:
        say_note(f"no curves.png: {error}")
    drafter = "medusa" if kind == "medusa" else "eagle"
    _say(f"written: {folder}; the run itself is in {run_folder(folder)} and can go")
    _say(f"forerun chat --model {model} --drafter {drafter} --draft-model {folder}")


def _recipe(kind: str, seed: int, given: dict[str, Any]) -> Recipe:
    from ..train.recipes import default_recipe

    known = {name: value for name, value in given.items() if value is not None}
    return replace(default_recipe(kind), seed=seed, **known)


def _make_rows(model: str, folder: Path, tokens: int, data: Path | None, seed: int) -> None:
    from ..engine.engine import Engine
    from ..model.loader import open_model
    from ..registry import resolve_model
    from ..train.__main__ import describe
    from ..train.data import DataSettings, make_rows

    trained = open_model(resolve_model(model)).config.max_positions
    engine = Engine.from_pretrained(
        model,
        drafter="none",
        max_model_len=min(DATA_CONTEXT, trained),
        max_num_seqs=AT_ONCE,
        max_num_batched_tokens=512,
    )
    with engine:
        make_rows(
            engine,
            folder,
            num_tokens=tokens,
            model=model,
            settings=DataSettings(seed=seed),
            data=data,
            report=lambda progress: _say(describe(progress)),
        )


@contextmanager
def _live() -> Iterator[Callable[[str, bool], None]]:
    """Show what passes in one line of a terminal, or now and then as lines; keep what matters."""
    if is_terminal(sys.stderr):
        with err.status("") as status:

            def show(line: str, matters: bool) -> None:
                if matters:
                    _say(line)
                else:
                    status.update(printable(line))

            yield show
        return
    last_s = [0.0]

    def tell(line: str, matters: bool) -> None:
        if matters or time.monotonic() - last_s[0] >= QUIET_LINES_S:
            last_s[0] = time.monotonic()
            _say(line)

    yield tell


def _command(kind: str, options: Mapping[str, Any]) -> str:
    """Spell the command, for the card."""
    words = ["forerun", "train", kind]
    for name, value in options.items():
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)


def _say(line: str) -> None:
    out.print(printable(line), soft_wrap=True)
