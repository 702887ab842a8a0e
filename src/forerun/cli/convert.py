"""`forerun convert`: turn a published draft head into files that are read here, or explain it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from .screen import out, printable, spinner

__all__ = ["convert"]


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A head's folder, or its .pt, .bin or .safetensors file.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="TARGET",
            help="The model that the head drafts for: a name, a folder or a .gguf file.",
            show_default=False,
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The folder to write.", show_default=False),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only explain what the head is; write nothing.")
    ] = False,
) -> None:
    """Turn a published Medusa or EAGLE head into safetensors, checked against its target."""
    if check == (folder is not None):
        raise ConfigError("say --out DIR to write the head, or --check to explain it only")
    from ..heads.convert import convert_head
    from ..heads.explain import explain
    from ..model.loader import open_model
    from ..registry import resolve_model

    with spinner(f"reading {source} ..."):
        target = open_model(resolve_model(model)).config
        done = convert_head(source, folder, target)
    _say(f"read: {', '.join(done.files)}")
    for line in explain(done.head):
        _say(line)
    if folder is not None:
        _say(f"written: {folder}")


def _say(line: str) -> None:
    # Names come out of files from elsewhere.
    out.print(printable(" ".join(line.split())), soft_wrap=True)
