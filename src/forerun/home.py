"""Where forerun keeps what it fetched and compiled."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["forerun_home"]


def forerun_home() -> Path:
    """Name the folder: $FORERUN_HOME, else ~/.cache/forerun."""
    stated = os.environ.get("FORERUN_HOME")
    return Path(stated).expanduser() if stated else Path.home() / ".cache" / "forerun"
