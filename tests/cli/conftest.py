"""Two ways to run the program: as a process of its own, and inside this one."""

from __future__ import annotations

import logging
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import MODEL, Cli, Ended, command, model_folder

from forerun.cli import main


@pytest.fixture
def inside(capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Run the program in this process: fast, for what needs no model."""
    logger, show = logging.getLogger("forerun"), warnings.showwarning
    handlers, propagate = list(logger.handlers), logger.propagate

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        code = main(arguments)
        said = capsys.readouterr()
        return Ended(code, said.out, said.err)

    yield run
    logger.handlers[:], logger.propagate, warnings.showwarning = handlers, propagate, show


@pytest.fixture(scope="session")
def outside() -> Cli:
    """Run the program as people do."""

    def run(*arguments: str, stdin: str | bytes = "") -> Ended:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run(
            command(*arguments), input=given, capture_output=True, timeout=300, check=False
        )
        return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture(scope="session")
def model() -> str:
    """The pulled model's name; tests that take it are marked `model`."""
    if not (model_folder() / "config.json").is_file():
        pytest.skip(f"{MODEL} is not here; fetch it with: forerun pull {MODEL}")
    return MODEL


@pytest.fixture
def no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty $FORERUN_HOME."""
    monkeypatch.setitem(os.environ, "FORERUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
