"""Who may join the queue, and when to come back if not: bounded by requests and by prompt tokens.

What waits is what the engine has not scheduled yet, asked of the requests themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from ..engine.request import Request
from ..errors import Overloaded, RateLimited
from .config import ServerConfig
from .keys import ApiKey

__all__ = ["Admission", "Ticket"]

REMEMBERED = 64  # ends, for the rate at which places come free
LONGEST_WAIT_S = 120.0


class Ticket:
    """One HTTP request's place: its engine requests, from admission until it is given back."""

    def __init__(self, requests: Iterable[Request], key: ApiKey | None) -> None:
        self.requests = tuple(requests)
        self.key = key

    @property
    def waiting(self) -> list[Request]:
        """The requests that have not begun."""
        return [each for each in self.requests if each.scheduled_s is None]


class Admission:
    """Counts what is under way. In the event loop only."""

    def __init__(
        self, config: ServerConfig, num_places: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`num_places` is how many requests the engine runs at once."""
        self._config = config
        self._num_places = num_places
        self._clock = clock
        self._tickets: set[Ticket] = set()
        self._ended: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)  # when, how many requests
        self.is_draining = False

    @property
    def num_under_way(self) -> int:
        """HTTP requests that have been admitted and not yet answered whole."""
        return len(self._tickets)

    def check_open(self) -> None:
        """Raise `Overloaded` if the server is about to end."""
        if self.is_draining:
            raise Overloaded(
                "the server is shutting down and takes no more requests",
                self._config.drain_timeout_s,
            )

    def enter(self, requests: Iterable[Request], key: ApiKey | None) -> Ticket:
        """Admit the engine requests of one HTTP request, or say when to come back.

        Raises:
            Overloaded: 503, the queue is full or the server is ending.
            RateLimited: 429, the key has too much under way.
        """
        self.check_open()
        ticket = Ticket(requests, key)
        if key is not None and key.max_requests is not None:
            own = sum(each.key is not None and each.key.name == key.name for each in self._tickets)
            if own >= key.max_requests:
                raise RateLimited(
                    f"{own} requests of this API key are under way, and {key.max_requests} are the "
                    "most",
                    self._wait_s(1),
                )
        num_running = sum(len(each.requests) - len(each.waiting) for each in self._tickets)
        waiting = [request for each in self._tickets for request in each.waiting]
        num_free = max(0, self._num_places - num_running)
        # Those who find a free place do not wait; the rest of them all must fit the queue.
        num_queued = max(0, len(waiting) + len(ticket.requests) - num_free)
        if num_queued > self._config.max_queued_requests:
            raise Overloaded(
                f"the queue is full: {len(waiting)} requests wait, and beyond {self._num_places} "
                f"running {self._config.max_queued_requests} are the most",
                self._wait_s(num_queued - self._config.max_queued_requests),
            )
        tokens = sum(each.num_prompt for each in waiting)
        own_tokens = sum(each.num_prompt for each in ticket.requests)
        # One request alone is taken whatever its size: the context bounds it.
        if waiting and tokens + own_tokens > self._config.max_queued_tokens:
            raise Overloaded(
                f"the queue is full: prompts of {tokens} tokens wait, this one has {own_tokens}, "
                f"and {self._config.max_queued_tokens} are the most",
                self._wait_s(len(waiting)),
            )
        self._tickets.add(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give a place back."""
        self._tickets.discard(ticket)
        self._ended.append((self._clock(), len(ticket.requests)))

    def _wait_s(self, num_requests: int) -> float:
        """Guess how long it takes until so many requests have ended, from how fast they do."""
        now_s = self._clock()
        if len(self._ended) < 2:
            return 1.0
        span_s = max(now_s - self._ended[0][0], 1e-3)
        rate = sum(count for _, count in self._ended) / span_s
        return min(LONGEST_WAIT_S, max(1.0, num_requests / rate))
