"""The thread that steps the engine, and the mailboxes between it and its callers.

Everything that touches requests runs in this one thread; callers post commands and read events.
The model is loaded in it too: OpenMP keeps a team of workers for every thread that computes,
and two teams on the same processors make each other sleep (a pass takes twice as long).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ..errors import EngineClosed, EngineDied
from ..types import FinishReason, TokenEvent
from .core import EngineCore
from .request import Request

__all__ = ["EngineLoop", "Pulse", "Sink"]

logger = logging.getLogger(__name__)

# Receives a request's events, in the loop's thread; must not block and must not raise.
Sink = Callable[[TokenEvent], None]


@dataclass(frozen=True, slots=True)
class Pulse:
    """A sign of life of the engine's thread."""

    is_alive: bool
    is_busy: bool  # inside a step, or about to begin one
    since_beat_s: float  # since a step last began or ended

    def hangs(self, longest_step_s: float) -> bool:
        """Say whether a step has taken longer than any should."""
        return self.is_busy and self.since_beat_s > longest_step_s


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    sink: Sink


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: int


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[EngineCore], Any]
    answer: Future[Any]


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Command = _Submit | _Cancel | _Call | _Close


class EngineLoop:
    """Steps while there is work, sleeps while there is none."""

    def __init__(self, build: Callable[[], EngineCore]) -> None:
        """Build the core in the new thread, and wait for it; what `build` raises is raised here."""
        self._build = build
        self._built: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._is_closed = False
        self._door = threading.Lock()  # held to post a command, and to close
        self._is_busy = False
        self._beat_s = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        self._thread.start()
        error = self._built.get()
        if error is not None:
            self._is_closed = True
            raise error

    def submit(self, request: Request, sink: Sink) -> None:
        """Start a request; its events go to `sink` until one has a finish reason."""
        self._post(_Submit(request, sink))

    def cancel(self, request_id: int) -> None:
        """End a request within one step. One that has ended already is left alone."""
        self._post(_Cancel(request_id))

    def call(self, function: Callable[[EngineCore], Any]) -> Future[Any]:
        """Run a function in the engine's thread, between two steps."""
        answer: Future[Any] = Future()
        self._post(_Call(function, answer))
        return answer

    @property
    def load(self) -> tuple[int, int, int]:
        """Requests that run and that wait, and cache blocks in use; from any thread."""
        return self._core.load

    def pulse(self) -> Pulse:
        """Say how the thread is; from any thread, at any time, without waiting."""
        alive = self._thread.is_alive() and not self._is_closed
        return Pulse(alive, self._is_busy, time.perf_counter() - self._beat_s)

    def close(self) -> None:
        """End everything that runs, and the thread. Calling it again does nothing."""
        with self._door:
            self._is_closed = True
            self._commands.put(_Close())
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: _Command) -> None:
        with self._door:  # so that nothing is posted after the loop's last look
            if self._is_closed:
                raise EngineClosed("the engine is closed; make a new one")
            self._commands.put(command)

    def _run(self) -> None:
        try:
            self._core = self._build()
        except BaseException as error:  # noqa: BLE001  (handed to whoever waits in __init__)
            self._built.put(error)
            return
        self._built.put(None)
        try:
            while self._obey(wait=not self._core.has_work):
                self._beat(is_busy=True)
                events = self._core.step()
                self._beat(is_busy=self._core.has_work)
                for event in events:
                    self._deliver(event)
        except BaseException as error:
            logger.critical("the engine's thread died", exc_info=True)
            self._end_all(EngineDied(f"the engine died: {type(error).__name__}: {error}"))
        else:
            self._end_all(EngineClosed("the engine was closed while the request ran"))

    def _obey(self, *, wait: bool) -> bool:
        """Carry out what was posted; false once the loop is to end."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            match command:
                case _Submit(request, sink):
                    self._sinks[request.request_id] = sink
                    self._core.add(request)
                case _Cancel(request_id):
                    event = self._core.cancel(request_id)
                    if event is not None:
                        self._deliver(event)
                case _Call(function, answer):
                    try:
                        answer.set_result(function(self._core))
                    except BaseException as error:  # noqa: BLE001  (its caller's, not ours)
                        answer.set_exception(error)
                case _Close():
                    return False
            wait = wait and not self._core.has_work

    def _beat(self, *, is_busy: bool) -> None:
        self._beat_s = time.perf_counter()
        self._is_busy = is_busy

    def _deliver(self, event: TokenEvent) -> None:
        sink = self._sinks[event.request_id]
        if event.finish_reason is not None:
            del self._sinks[event.request_id]
        sink(event)

    def _end_all(self, error: EngineClosed) -> None:
        with self._door:
            self._is_closed = True
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Submit):
                self._sinks[command.request.request_id] = command.sink
            elif isinstance(command, _Call):
                command.answer.set_exception(error)
        for request_id, sink in self._sinks.items():
            sink(TokenEvent(request_id, (), None, 0, FinishReason.ERROR, error))
        self._sinks.clear()
