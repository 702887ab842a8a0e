"""Events on their way from the engine's thread to the event loop: one wake-up a step, not one each.

A step over 32 requests makes 32 events; waking the loop costs more than handing one over.
"""

from __future__ import annotations

import asyncio
from collections import deque

from ..types import TokenEvent

__all__ = ["Inbox", "Mail"]

# Events of an HTTP request's engine requests; or what ends it from outside: its time, the server.
Mail = asyncio.Queue[TokenEvent | Exception]


class Inbox:
    """Sorts the events of all requests into one queue per reader."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[TokenEvent] = deque()
        self._is_awake = False  # a sorting is due
        self._readers: dict[int, Mail] = {}

    def register(self, request_ids: list[int], mail: Mail) -> None:
        """Have the events of some requests come to `mail`. In the event loop."""
        for request_id in request_ids:
            self._readers[request_id] = mail

    def forget(self, request_ids: list[int]) -> None:
        """Drop what may still come for requests that nobody reads any more. In the event loop."""
        for request_id in request_ids:
            self._readers.pop(request_id, None)

    def put(self, event: TokenEvent) -> None:
        """Take an event in. In the engine's thread; does not wait."""
        self._events.append(event)
        if not self._is_awake:
            self._is_awake = True
            try:
                self._loop.call_soon_threadsafe(self._sort)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    def _sort(self) -> None:
        self._is_awake = False  # before the last look: what comes after it wakes us again
        while self._events:
            event = self._events.popleft()
            reader = self._readers.get(event.request_id)
            if reader is not None:
                reader.put_nowait(event)
