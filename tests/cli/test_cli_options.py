"""Option groups: dataclasses whose fields become a command's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from forerun.cli.options import EngineOptions, takes_groups
from forerun.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    width: Annotated[int, typer.Option("--width")]
    unit: Annotated[str, typer.Option("--unit")] = "cm"


def test_fields_become_options() -> None:
    app = typer.Typer()

    @app.command()
    @takes_groups
    def draw(size: Size, colour: Annotated[str, typer.Option("--colour")] = "red") -> None:
        """Draw."""
        typer.echo(f"{size.width} {size.unit} {colour}")

    runner = CliRunner()
    assert runner.invoke(app, ["--width", "3", "--colour", "blue"]).stdout == "3 cm blue\n"
    assert runner.invoke(app, ["--width", "3", "--unit", "m"]).stdout == "3 m red\n"
    assert runner.invoke(app, []).exit_code == 2


def test_speculation_merges_options_and_json() -> None:
    options = EngineOptions(
        model="m", draft_tokens=3, speculative_config='{"method": "ngram", "prompt_lookup_max": 6}'
    )
    assert options.speculation() == {"method": "ngram", "prompt_lookup_max": 6, "max_draft": 3}
    twice = EngineOptions(
        model="m", draft_tokens=3, speculative_config='{"num_speculative_tokens": 4}'
    )
    with pytest.raises(ConfigError, match="--draft-tokens and 'num_speculative_tokens'"):
        twice.speculation()
