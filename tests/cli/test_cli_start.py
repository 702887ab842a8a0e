"""What the program says before it does anything, and what it must not load for that."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import Cli, command

import forerun
from forerun import __version__

COMMANDS = ("pull", "generate", "chat", "demo")


def test_version(outside: Cli) -> None:
    ended = outside("--version")
    assert (ended.code, ended.stdout, ended.stderr) == (0, f"forerun {__version__}\n", "")


def test_help_lists_every_command(inside: Cli) -> None:
    for arguments in ([], ["--help"]):
        ended = inside(*arguments)
        assert ended.code == 0
        for name in COMMANDS:
            assert f"\n  {name} " in ended.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_fits_80_columns(
    inside: Cli, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = inside(name, "--help")
    assert ended.code == 0
    assert max(map(len, ended.stdout.splitlines())) <= 80


def test_starting_the_program_loads_no_torch() -> None:
    # A stand-in for the package keeps its own __init__ out: the command line is what is tested.
    package = str(Path(forerun.__file__).parent)
    code = f"""
import sys, types
package = types.ModuleType("forerun")
package.__path__ = [{package!r}]
sys.modules["forerun"] = package
from forerun.cli import main
for line in (["--help"], ["generate", "--temprature", "1"], ["generate", "--help"]):
    main(line)
heavy = {{"torch", "numba", "numpy", "tokenizers"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_into_a_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command("--help"), stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_encoding_without_the_character_stops_nothing(
    inside: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(raw, encoding="ascii"))
    assert inside("pull", "naïve").code == 2
    sys.stderr.flush()
    assert b"'na\\xefve'" in raw.getvalue()
