"""How kernels are compiled, and where the result is kept.

numba keeps compiled functions on disk by the age of the one file that holds them; our kernels are
inlined across files, so a change in one would leave the others stale. Here the folder's name holds
a hash of all of them: what is found in it was compiled from just these sources.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba import njit

from ..home import forerun_home

__all__ = ["FAST", "compiled"]

# Sums may be reassociated into vectors: which order that gives depends on the row's width alone.
# NaN and infinity keep their meaning, so that they are noticed.
FAST = {"contract", "reassoc", "nsz", "arcp"}


def compiled(*, fast: bool = True, parallel: bool = False) -> Callable[[Any], Any]:
    """Compile a kernel when it is first called with given formats; keep it on disk."""

    def decorate(function: Any) -> Any:
        fastmath = FAST if fast else False
        with _cache_folder(cache_path()):
            return njit(cache=True, nogil=True, parallel=parallel, fastmath=fastmath)(function)

    return decorate


def cache_path() -> Path:
    """Name the folder for what these sources compile to with this numba."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return forerun_home() / "kernels" / digest.hexdigest()[:16]


@contextlib.contextmanager
def _cache_folder(folder: Path) -> Iterator[None]:
    """Have numba choose `folder` for functions decorated inside, and leave its setting as it was.

    A user's own NUMBA_CACHE_DIR stands; a folder that cannot be written leaves numba its ways.
    """
    previous: str = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if usable and not previous:
        numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        numba.config.CACHE_DIR = previous  # type: ignore[attr-defined]
