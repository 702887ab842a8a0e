"""A live server on the loopback, in this process, with a tiny or a real model behind it.

The engine stays in reach, so that tests can ask after each fault whether anything leaked.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.engine.engine import Engine
from forerun.server.config import ServerConfig
from forerun.server.run import Server, make_server

__all__ = ["Live", "serving"]


class Live:
    """A running server: its address, its engine, its end."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.url = ""
        self._ready = threading.Event()
        self._server: Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server-under-test", daemon=True)
        self._thread.start()
        self._ready.wait(60)
        if self._error is not None:
            raise self._error
        assert self.url, "the server did not begin to listen"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    def check_idle(self, seconds: float = 10.0) -> None:
        """Wait until nothing runs, then check that nothing is held."""
        end_s = time.monotonic() + seconds
        admission = self.server.service.generations.admission
        while time.monotonic() < end_s:
            running, waiting, blocks = self.engine.load
            if not (running or waiting or blocks or admission.num_under_way):
                break
            time.sleep(0.02)
        assert self.engine.load == (0, 0, 0), "requests or blocks are still held"
        assert admission.num_under_way == 0, "a place in the queue was never given back"
        self.engine.call(lambda core: core.check_integrity()).result(10)

    def terminate(self) -> None:
        """Do what SIGTERM does."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.server.handle_exit, signal.SIGTERM, None)

    def join(self, seconds: float = 30.0) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the server did not end"

    def _run(self) -> None:
        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            self._server = make_server(self.engine, self.config, self._listening)
            await self._server.serve()

        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001  (raised by whoever waits)
            self._error = error
        finally:
            self._ready.set()

    def _listening(self, url: str) -> None:
        self.url = url
        self._ready.set()


@contextmanager
def serving(model: Path | str, *, server: dict | None = None, **engine) -> Iterator[Live]:
    """Serve a model; `server` are fields of ServerConfig, the rest options of the engine."""
    config = ServerConfig(**{"model_names": ("tiny",), "port": 0} | (server or {}))
    with Engine.from_pretrained(str(model), num_threads=1, **engine) as opened:
        live = Live(opened, config)
        try:
            yield live
        finally:
            if live._thread.is_alive():
                live.terminate()
                live.terminate()
                live.join()
