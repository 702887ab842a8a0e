"""Who may join the queue, and when to come back if not: bounded by requests and by prompt tokens.

What waits is what the engine has not scheduled yet, asked of the requests themselves.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from ..engine.request import Request
from ..errors import InvalidParameter, Overloaded, RateLimited
from .config import ServerConfig
from .keys import ApiKey

__all__ = ["Admission", "Ticket"]

REMEMBERED = 64  # ends, for the rate at which places come free
RECENT_S = 60.0
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
        self._preparing: set[tuple[object, ApiKey | None]] = set()
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

    @contextlib.contextmanager
    def preparing(self, key: ApiKey | None) -> Iterator[None]:
        """Hold a place for a request that is rendered, encoded and compiled before it is admitted.

        Raises:
            Overloaded, RateLimited: as `enter`; the queue is bounded wherever a request waits.
        """
        self.check_open()
        self._check_key(key)
        num_free = max(0, self._num_places - self._num_running())
        if len(self._preparing) >= num_free + self._config.max_queued_requests:
            raise Overloaded(
                f"the queue is full: {len(self._preparing)} requests are being prepared",
                self._wait_s(1),
            )
        place = (object(), key)
        self._preparing.add(place)
        try:
            yield
        finally:
            self._preparing.discard(place)

    def enter(self, requests: Iterable[Request], key: ApiKey | None) -> Ticket:
        """Admit the engine requests of one HTTP request, or say when to come back.

        Raises:
            Overloaded: 503, the queue is full or the server is ending.
            RateLimited: 429, the key has too much under way.
            InvalidParameter: more answers than there will ever be room for.
        """
        self.check_open()
        self._check_key(key)
        ticket = Ticket(requests, key)
        most = self._num_places + self._config.max_queued_requests
        if len(ticket.requests) > most:
            raise InvalidParameter(
                f"n: {len(ticket.requests)} answers are asked for at once, and this server takes "
                f"{most} at the most; send fewer prompts or samples"
            )
        waiting = [request for each in self._tickets for request in each.waiting]
        num_free = max(0, self._num_places - self._num_running())
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

    def _check_key(self, key: ApiKey | None) -> None:
        if key is None or key.max_requests is None:
            return
        own = sum(each.key is not None and each.key.name == key.name for each in self._tickets)
        own += sum(each is not None and each.name == key.name for _, each in self._preparing)
        if own >= key.max_requests:
            raise RateLimited(
                f"{own} requests of this API key are under way; {key.max_requests} are the most",
                self._wait_s(1),
            )

    def _num_running(self) -> int:
        return sum(
            request.scheduled_s is not None and request.finish_reason is None
            for each in self._tickets
            for request in each.requests
        )

    def leave(self, ticket: Ticket) -> None:
        """Give a place back."""
        self._tickets.discard(ticket)
        self._ended.append((self._clock(), len(ticket.requests)))

    def _wait_s(self, num_requests: int) -> float:
        """Guess how long it takes until so many requests end, from how fast they did lately."""
        now_s = self._clock()
        recent = [(when_s, count) for when_s, count in self._ended if now_s - when_s <= RECENT_S]
        if len(recent) < 2:
            return 1.0
        span_s = max(now_s - recent[0][0], 1e-3)
        rate = sum(count for _, count in recent) / span_s
        return min(LONGEST_WAIT_S, max(1.0, num_requests / rate))
