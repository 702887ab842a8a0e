"""A limit on how long Python code may run, for code that came with a model's files.

A template can loop without calling anything of ours, so nothing short of an exception from outside
ends it. CPython raises one between two bytecodes, anywhere: in the caller's own thread that could
be inside the machinery that starts or ends the limit. So the code runs in a thread made for it, and
only there is anything raised. Code that waits in C is not reached before it comes back.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["TimeIsUp", "run_within"]

Result = TypeVar("Result")

AGAIN_S = 0.1  # code may catch even this, in a finalizer for one: once more then


class TimeIsUp(BaseException):
    """The time of `run_within` is over. No `Exception`, so that the code cannot swallow it."""


def run_within(seconds: float, function: Callable[[], Result]) -> Result:
    """Give what `function` gives, or raises; it is ended once its time is over.

    It has ended when this returns, so whoever bounds its callers bounds what runs.

    Raises:
        TimeIsUp: it was not done in `seconds`.
    """
    worker = _Worker(function)
    worker.start()
    worker.join(seconds)
    if worker.is_alive():
        while worker.is_alive():
            worker.interrupt()
            worker.join(AGAIN_S)
        raise TimeIsUp
    if worker.failure is not None:
        raise worker.failure
    return worker.results[0]


class _Worker(threading.Thread, Generic[Result]):
    """Runs a function once, and can be made to stop in the middle of it."""

    def __init__(self, function: Callable[[], Result]) -> None:
        super().__init__(name="forerun-limited", daemon=True)
        self.results: list[Result] = []
        self.failure: BaseException | None = None
        self._function = function
        self._door = threading.Lock()  # nothing is raised in this thread but while it is inside
        self._inside = False

    def run(self) -> None:
        with self._door:
            self._inside = True
        # The loop: what is raised from outside may strike after the function, before the door.
        while self._inside:
            try:
                if not self.results and self.failure is None:
                    self._call()
                with self._door:
                    self._inside = False
            except TimeIsUp as failure:
                self.failure = failure

    def _call(self) -> None:
        try:
            self.results.append(self._function())
        except TimeIsUp:
            raise
        except BaseException as failure:  # noqa: BLE001 - the caller raises it
            self.failure = failure

    def interrupt(self) -> None:
        """Raise `TimeIsUp` in the thread, if it is inside the function."""
        with self._door:
            if self._inside and self.is_alive() and self.ident is not None:
                _raise_in(self.ident)


def _raise_in(thread_id: int) -> None:
    raised = ctypes.py_object(TimeIsUp)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), raised)
