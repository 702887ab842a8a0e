"""A limit on how long Python code may run in this thread, for code that came with a model's files.

A template can loop without calling anything of ours, so nothing short of an exception from outside
ends it. CPython raises one between two bytecodes; code that waits in C is not reached.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

__all__ = ["TimeIsUp", "time_limit"]


class TimeIsUp(BaseException):
    """The time of a `time_limit` is over. No `Exception`, so that the code cannot swallow it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeIsUp` inside the block once its time is over."""
    thread_id = threading.get_ident()
    door = threading.Lock()  # so that nothing is raised once the block is left
    is_over = False

    def interrupt() -> None:
        with door:
            if not is_over:
                _raise_in(thread_id)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with door:
            is_over = True
        # One that was raised at the very end arrives here at the latest: between two bytecodes.


def _raise_in(thread_id: int) -> None:
    raised = ctypes.py_object(TimeIsUp)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), raised)
