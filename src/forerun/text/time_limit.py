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


AGAIN_S = 0.1  # code may catch even this, in a finalizer for one: once more then


class TimeIsUp(BaseException):
    """The time of a `time_limit` is over. No `Exception`, so that the code cannot swallow it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeIsUp` inside the block once its time is over."""
    thread_id = threading.get_ident()
    door = threading.Lock()  # so that nothing is raised once the block is left
    over = threading.Event()

    def interrupt() -> None:
        wait_s = seconds
        while not over.wait(wait_s):
            with door:
                if not over.is_set():
                    _raise_in(thread_id)
            wait_s = AGAIN_S

    watcher = threading.Thread(target=interrupt, name="forerun-time-limit", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        _settle(door, over, thread_id)


def _settle(door: threading.Lock, over: threading.Event, thread_id: int) -> None:
    """See to it that nothing is raised from here on, not even what is on its way."""
    while True:
        try:
            with door:
                over.set()
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), None)
        except TimeIsUp:
            continue
        return


def _raise_in(thread_id: int) -> None:
    raised = ctypes.py_object(TimeIsUp)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), raised)
