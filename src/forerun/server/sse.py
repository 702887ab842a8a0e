"""Server-sent events: a stream's frames, signs of life in silence, news of leaving clients.

JSON is escaped to ASCII, since some clients split lines at U+2028 too. A stream always ends with
`[DONE]`, after an error too; and it ends at once when its client has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "EventStream", "frame", "until_disconnect"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # else nginx gathers the whole answer
}


def frame(data: Mapping[str, Any], padding: int = 0, event: str | None = None) -> bytes:
    """Write one event; `padding` fills it up to a multiple of so many bytes.

    With speculation the size of a chunk tells how many tokens a step gave, and that tells of the
    text (2411.01076); a filled-up one tells less.
    """
    head = "" if event is None else f"event: {event}\n"
    if padding:
        bare = len(json.dumps({**data, "obfuscation": ""}, separators=(",", ":")))
        data = {**data, "obfuscation": "0" * (-(len(head) + bare + len("data: ") + 2) % padding)}
    body = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return f"{head}data: {body}\n\n".encode()


class EventStream:
    """An ASGI response that sends frames as they come."""

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        ping_s: float,
        headers: Mapping[str, str],
        close: Callable[[], None],
        end_s: float | None = None,
    ) -> None:
        """`close` is called at the end, however it comes; by the loop's clock that is `end_s`."""
        self._frames = frames
        self._close = close
        self._end_s = end_s
        self._ping_s = ping_s
        self._headers = {**HEADERS, **headers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            # A client that does not read holds `send`, and must not hold its place for it.
            async with asyncio.timeout_at(self._end_s):
                await until_disconnect(receive, self._send(send))
        except TimeoutError:
            logger.warning("a client that did not read its stream was given up")
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        last_s = loop.time()

        async def ping() -> None:
            while True:
                silent_s = loop.time() - last_s
                if silent_s >= self._ping_s:
                    await send({"type": "http.response.body", "body": PING, "more_body": True})
                    silent_s = 0.0
                await asyncio.sleep(self._ping_s - silent_s)

        pinging = asyncio.create_task(ping())
        try:
            async with contextlib.aclosing(self._frames) as frames:  # type: ignore[type-var]
                async for each in frames:
                    last_s = loop.time()
                    await send({"type": "http.response.body", "body": each, "more_body": True})
        finally:
            pinging.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Answer]) -> Answer | None:
    """Do some work, unless the client leaves before it is done: then it is cancelled, and None."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    watching = asyncio.create_task(watch())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return None
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working
