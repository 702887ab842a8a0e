"""Running the server: listening, slow clients, and an orderly end.

SIGTERM: `/ready` says 503 and nothing more is admitted; what is under way has time to finish; what
then still runs ends with an error chunk and [DONE]; the process exits with 0.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..engine.engine import Engine
from .app import build_app
from .config import ServerConfig
from .history import History
from .metrics import Metrics
from .service import Service

__all__ = ["Server", "make_server", "serve"]

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15
MAX_HEAD_BYTES = 64 * 1024
CLOSING_S = 3.0  # for error chunks to reach their clients
POLL_S = 0.05
SPARE_FILES = 256  # beside connections: weights, the event loop, children


def serve(engine: Engine, config: ServerConfig, on_listening: Callable[[str], None]) -> None:
    """Serve a loaded engine until the process is told to end. `on_listening` hears the address."""

    async def run() -> None:
        await make_server(engine, config, on_listening).serve()

    _allow_open_files(config.max_connections + SPARE_FILES)
    asyncio.run(run())


def make_server(
    engine: Engine, config: ServerConfig, on_listening: Callable[[str], None]
) -> Server:
    """Put a server together. Inside the event loop that will run it."""
    method: str = engine.call(lambda core: core.method).result()
    metrics = Metrics(
        config.model_name,
        engine.config.speculation.max_draft,
        engine.max_model_len,
        method=method,
        compat_vllm=config.metrics_compat == "vllm",
    )
    history = History(method)
    service = Service(engine, config, metrics, history)
    engine.observe(metrics.on_step)
    engine.observe(history.on_step)
    history.event("start", f"serving {config.model_name} with {method} drafts")
    settings = uvicorn.Config(
        build_app(service),
        host=config.host,
        port=config.port,
        http=_protocol(config.header_timeout_s, config.max_connections),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(CLOSING_S) + 1,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        backlog=1024,
    )
    return Server(settings, service, on_listening)


class Server(uvicorn.Server):
    """uvicorn's server, with an end in two steps: drain, then close."""

    def __init__(
        self, config: uvicorn.Config, service: Service, on_listening: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self.service = service
        self._on_listening = on_listening
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            port = self.servers[0].sockets[0].getsockname()[1]
            host = self.config.host
            shown = f"[{host}]" if ":" in host else host
            self._on_listening(f"http://{shown}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second signal ends at once."""
        if self._draining is not None or self.service.generations.admission.is_draining:
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT
            return
        self.service.generations.admission.is_draining = True
        self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        admission = self.service.generations.admission
        seconds = self.service.config.drain_timeout_s
        logger.info("ending: %d requests under way", admission.num_under_way)
        self.service.history.event("drain", f"{admission.num_under_way} requests under way")
        await self._wait_until_idle(seconds)
        if admission.num_under_way:
            logger.warning("cutting %d answers after %g s", admission.num_under_way, seconds)
            self.service.generations.end_all()
            await self._wait_until_idle(CLOSING_S)
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            transport = connection.transport  # of a client that does not read what it is sent
            if transport is not None:
                transport.abort()
        await asyncio.sleep(0)
        self.service.close()

    async def _wait_until_idle(self, seconds: float) -> None:
        admission = self.service.generations.admission
        end_s = self._loop.time() + seconds
        while admission.num_under_way and self._loop.time() < end_s and not self.should_exit:
            await asyncio.sleep(POLL_S)


def _allow_open_files(wanted: int) -> None:
    """Raise this process's own limit on open files, often 1,024, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed < wanted:
        logger.warning("this process may open %d files; %d connections want more", allowed, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _protocol(header_timeout_s: float, max_connections: int) -> type[H11Protocol]:
    """Make uvicorn's HTTP/1.1, with a limit on connections and on the time for a request's head.

    uvicorn limits only the idle time after an answer; a client that sends a header a minute would
    keep its connection for ever.
    """

    class TimedProtocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()  # nothing was asked yet, so clients may ask again elsewhere
                return
            self._await_head()

        def data_received(self, data: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:
                # Between requests: the idle time is uvicorn's, a begun head has its own.
                self._await_head()
            super().data_received(data)

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            if self.cycle is not before:
                self._stop_waiting()

        def send_400_response(self, msg: str) -> None:
            # uvicorn would begin an answer where one is under way already.
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:
                self.transport.close()
            if self.cycle is not None:
                # Whoever still works on the request hears that nobody waits for an answer.
                self.cycle.disconnected = True
                self.cycle.message_event.set()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _await_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(header_timeout_s, self._give_up)

        def _stop_waiting(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _give_up(self) -> None:
            self._head_timer = None
            if not self.transport.is_closing():
                self.transport.close()

    return TimedProtocol
