"""What the README tells people to type works, as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.model


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(command: list[str], stdin: str = "") -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COMMANDS = [line for block in blocks("sh") for line in block.strip().splitlines()]


def as_case(line: str):
    """A certificate takes minutes."""
    return pytest.param(line, marks=pytest.mark.slow if "certify" in line else ())


ENDING = [line for line in COMMANDS if " serve " not in line]


@pytest.mark.parametrize("line", [as_case(line) for line in ENDING])
def test_a_command_works(line: str) -> None:
    talk = "What is two plus two?\n/quit\n" if "chat" in line else ""
    assert run(shlex.split(line), talk).strip()


def test_the_server_command_works() -> None:
    """It answers, and ends with 0 when told to; on a port of its own, others may use 8000."""
    (line,) = [line for line in COMMANDS if line not in ENDING]
    program = str(Path(sys.executable).parent / "forerun")
    command = [program, *shlex.split(line)[1:], "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        seen = ""
        for told in process.stderr:
            seen += told
            if found := re.search(r"at (http://\S+)", told):
                break
        else:
            raise AssertionError(seen)
        with urllib.request.urlopen(f"{found[1]}/ready") as answer:
            assert answer.status == 200
        process.terminate()
        assert process.wait(60) == 0


def test_the_python_example_works() -> None:
    (code,) = blocks("python")
    output = run([sys.executable, "-c", code])
    assert "Paris" in output


def test_there_is_something_to_test() -> None:
    assert len(COMMANDS) >= 4


def test_make_knows_the_first_two_commands() -> None:
    first_two = re.findall(r"^    (make \w+)", README, flags=re.MULTILINE)[:2]
    assert first_two == ["make demo", "make test"]
    for command in first_two:
        assert run(["make", "--dry-run", *command.split()[1:]])


def test_ci_runs_the_readmes_test_command() -> None:
    last = (ROOT / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert last == "exec make test"
