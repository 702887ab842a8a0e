"""The program `forerun`: one module per command. Starting it imports no torch; commands do.

Nobody imports this package from the library, and no command knows how an error is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .._version import __version__
from .certify import certify
from .chat import chat
from .convert import convert
from .demo import demo
from .failures import run
from .generate import generate
from .pull import pull
from .serve import serve
from .train import train

__all__ = ["app", "main"]

app = typer.Typer(
    name="forerun",
    help="A self-hosted language model answers sooner, and says the same.",
    epilog="In Python: from forerun import Engine, SamplingParams",
    add_completion=False,
    pretty_exceptions_enable=False,  # failures.py shows them
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"forerun {__version__}")
        raise typer.Exit


@app.callback()
def _forerun(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Say which version this is."
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


for command in (pull, generate, chat, serve, demo, certify, convert, train):
    app.command()(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return run(app, given or ["--help"])
