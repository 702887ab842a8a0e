"""Where a figure comes from: versions, processor, commit, arguments."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .._version import __version__
from ..device import available_cpus, cpu_name

__all__ = ["provenance"]

PACKAGES = ("torch", "numpy", "numba", "llvmlite", "tokenizers", "safetensors")


def provenance() -> dict[str, Any]:
    """Describe this run well enough that somebody else could repeat it."""
    return {
        "forerun": __version__,
        "git": _commit(Path(__file__).parent),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "processor": cpu_name(),
        "cpus": available_cpus(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
    }


def _commit(folder: Path) -> str | None:
    """Name the commit of the checkout that runs, marked if it was changed; None outside one."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=folder, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
