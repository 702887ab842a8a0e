"""One HTTP request's answers, from prepared prompts to chunks, within its time; and their ends.

Whatever happens to the request (its client leaves, its time is over, the server ends), the engine
stops working for it within one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from ..engine.engine import Engine
from ..engine.request import Request
from ..engine.results import Bundle, Chunk
from ..errors import DeadlineExceeded, EngineClosed, Overloaded, RateLimited
from ..types import FinishReason
from .admission import Admission, Ticket
from .config import ServerConfig
from .history import History
from .inbox import Inbox, Mail
from .keys import ApiKey
from .metrics import Metrics

__all__ = ["Generation", "Generations", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of one of the answers that an HTTP request gets."""

    index: int  # which answer: prompts in order, each with its n samples
    chunk: Chunk


class Generations:
    """Runs the answers of HTTP requests on one engine. In the event loop only."""

    def __init__(
        self, engine: Engine, config: ServerConfig, metrics: Metrics, history: History
    ) -> None:
        self._engine = engine
        self._config = config
        self._metrics = metrics
        self._history = history
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(self._loop)
        self._open: set[Mail] = set()
        self.admission = Admission(config, engine.config.max_num_seqs)

    def end_all(self) -> None:
        """End every answer under way with an error: the time to drain is over."""
        for mail in self._open:
            mail.put_nowait(EngineClosed("the server is shutting down; the answer was cut"))

    def open(self, bundles: Sequence[Bundle], key: ApiKey | None, deadline_s: float) -> Generation:
        """Admit prepared prompts. Whoever gets the generation closes it.

        Raises:
            Overloaded, RateLimited: there is no room, before anything is started.
        """
        requests = [request for bundle in bundles for request in bundle.requests]
        ticket = self._enter(requests, key)
        return Generation(self, bundles, ticket, deadline_s)

    @contextlib.contextmanager
    def preparing(self, key: ApiKey | None) -> Iterator[None]:
        """Hold a place while a request is prepared; see `Admission.preparing`."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.admission.preparing(key))
            except Overloaded as error:
                self._count_refusal(error)
                raise
            yield

    def _enter(self, requests: Sequence[Request], key: ApiKey | None) -> Ticket:
        try:
            return self.admission.enter(requests, key)
        except Overloaded as error:
            self._count_refusal(error)
            raise

    def _count_refusal(self, error: Overloaded) -> None:
        limited = isinstance(error, RateLimited)
        self._metrics.on_rejected("key_limit" if limited else "queue_full")
        self._history.event("rejected", str(error))

    def note(self, request: Request, reason: FinishReason) -> None:
        """Count a request that has ended."""
        stats = request.snapshot(time.perf_counter())
        self._metrics.on_request_finished(stats, reason, request.params)
        self._history.on_finished(stats, reason)

    def begin(self, bundles: Sequence[Bundle], mail: Mail) -> None:
        """Start admitted requests, and have their events come as mail."""
        self._open.add(mail)
        requests = [request for bundle in bundles for request in bundle.requests]
        self._inbox.register([request.request_id for request in requests], mail)
        for bundle in bundles:
            self._engine.start(bundle, self._inbox.put)
        for request in requests:
            if request.sample_index == 0:  # its prompt counts once, however many answers it has
                self._metrics.on_request_started(request.num_prompt, request.params)

    def end(self, bundles: Sequence[Bundle], mail: Mail, *, unfinished: Sequence[Request]) -> None:
        """Have the engine drop what still runs, and forget the mail."""
        if unfinished:
            for bundle in bundles:
                self._engine.cancel(bundle)
            for request in unfinished:
                self.note(request, FinishReason.CANCELLED)
        self._open.discard(mail)
        self._inbox.forget([each.request_id for bundle in bundles for each in bundle.requests])

    def set_timers(
        self, mail: Mail, ticket: Ticket, deadline_s: float
    ) -> list[asyncio.TimerHandle]:
        """Have the end of a request's time arrive like any other news."""
        queue_s = self._config.queue_timeout_s

        def end() -> None:
            mail.put_nowait(
                DeadlineExceeded("the request's time was over before its answer was whole")
            )

        def end_if_waiting() -> None:
            if ticket.waiting:
                mail.put_nowait(
                    Overloaded(f"the request waited {queue_s:g} s for a place; try again", queue_s)
                )

        return [
            self._loop.call_at(deadline_s, end),
            self._loop.call_later(queue_s, end_if_waiting),
        ]


class Generation:
    """The answers of one HTTP request. Its place is taken at birth and given back by `close`."""

    def __init__(
        self,
        owner: Generations,
        bundles: Sequence[Bundle],
        ticket: Ticket,
        deadline_s: float,
    ) -> None:
        self._owner = owner
        self._bundles = bundles
        self._ticket = ticket
        self._mail: Mail = asyncio.Queue()
        self.deadline_s = deadline_s
        self._timers = owner.set_timers(self._mail, ticket, deadline_s)
        self._unfinished: dict[int, Request] = {}
        self._is_closed = False

    async def pieces(self) -> AsyncIterator[Piece]:
        """Start the requests, and hand on the chunks of all answers as they are made.

        Raises:
            DeadlineExceeded, Overloaded: the request's time, or its time in the queue, is over.
            ForerunError: one of the answers failed; the others end with it.
        """
        owners = {each.request_id: bundle for bundle in self._bundles for each in bundle.requests}
        places = {request_id: index for index, request_id in enumerate(owners)}
        requests = [request for bundle in self._bundles for request in bundle.requests]
        self._unfinished = {request.request_id: request for request in requests}
        self._owner.begin(self._bundles, self._mail)
        while self._unfinished:
            event = await self._mail.get()
            if isinstance(event, Exception):
                raise event
            chunk = owners[event.request_id].take(event)
            if chunk.result is not None:
                request = self._unfinished.pop(event.request_id)
                self._owner.note(request, chunk.result.finish_reason)
                if chunk.result.error is not None:
                    raise chunk.result.error
            yield Piece(places[event.request_id], chunk)

    def close(self) -> None:
        """End what still runs and give the place back. Calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()
        unfinished, self._unfinished = list(self._unfinished.values()), {}
        try:
            self._owner.end(self._bundles, self._mail, unfinished=unfinished)
        finally:
            self._owner.admission.leave(self._ticket)
