"""The one lock around numba's pool of threads.

numba has one pool per process. Where it finds no OpenMP (macOS, bare containers) that pool ends the
process if two threads enter it at once, as two engines would.
"""

from __future__ import annotations

import threading

__all__ = ["POOL"]

POOL = threading.Lock()
