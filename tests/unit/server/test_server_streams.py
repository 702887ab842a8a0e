"""Streams and doors as bare ASGI: clients that leave at any moment, odd scopes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from forerun.server.config import ServerConfig
from forerun.server.gate import Gate
from forerun.server.keys import ApiKey
from forerun.server.sse import DONE, PING, EventStream, frame, until_disconnect

KEY = ApiKey.of("alicekey1", "alice")


class Client:
    """Receives what a response sends; leaves when told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.on_send: Callable[[], None] = lambda: None

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.on_send()

    @property
    def body(self) -> bytes:
        return b"".join(each.get("body", b"") for each in self.sent)


def run(test: Any) -> None:
    async def whole() -> None:
        await asyncio.wait_for(test(), 30)
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for _ in range(20):
            await asyncio.sleep(0)
            left = {each for each in left if not each.done()}
        assert not left, f"tasks were left behind: {left}"

    asyncio.run(whole())


class Frames:
    """Frames that come until told; says how it ended."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count
        self.begun = False
        self.ended = False
        self.waits = asyncio.Event()

    async def __call__(self) -> AsyncIterator[bytes]:
        self.begun = True
        try:
            number = 0
            while self.count is None or number < self.count:
                yield b"data: %d\n\n" % number
                number += 1
                await asyncio.sleep(0)
            yield DONE
        finally:
            self.ended = True


def stream(frames: AsyncIterator[bytes], closed: list[int], ping_s: float = 15.0) -> EventStream:
    return EventStream(frames, ping_s, {}, lambda: closed.append(1))


def test_a_stream_ends_and_closes() -> None:
    async def test() -> None:
        client, frames, closed = Client(), Frames(3), []
        await stream(frames(), closed)({}, client.receive, client.send)
        assert client.body.endswith(DONE)
        assert client.sent[-1]["more_body"] is False
        assert closed == [1]

    run(test)


@pytest.mark.parametrize("at", range(1, 8))
def test_a_client_that_leaves_during_a_send(at: int) -> None:
    async def test() -> None:
        client, frames, closed = Client(), Frames(), []
        client.on_send = lambda: client.left.set() if len(client.sent) == at else None
        await stream(frames(), closed)({}, client.receive, client.send)
        assert closed == [1]
        assert frames.ended or not frames.begun
        assert client.sent[-1]["type"] == "http.response.start" or len(client.sent) <= at + 3

    run(test)


def test_a_client_that_has_gone_before_the_first_byte() -> None:
    """The generator is never started: whoever waits for its `finally` would wait for ever."""

    async def test() -> None:
        client, frames, closed = Client(), Frames(), []
        client.left.set()
        await stream(frames(), closed)({}, client.receive, client.send)
        assert closed == [1]

    run(test)


def test_a_stream_that_is_cancelled_from_outside() -> None:
    async def test() -> None:
        client, frames, closed = Client(), Frames(), []
        task = asyncio.create_task(stream(frames(), closed)({}, client.receive, client.send))
        while len(client.sent) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == [1]
        assert frames.ended

    run(test)


def test_a_send_that_raises_closes_too() -> None:
    async def test() -> None:
        client, frames, closed = Client(), Frames(), []

        def fail() -> None:
            if len(client.sent) == 3:
                raise OSError("the pipe broke")

        client.on_send = fail
        with pytest.raises(OSError, match="the pipe broke"):
            await stream(frames(), closed)({}, client.receive, client.send)
        assert closed == [1]

    run(test)


def test_a_silent_stream_gives_signs_of_life() -> None:
    async def test() -> None:
        client, closed = Client(), []

        async def silent() -> AsyncIterator[bytes]:
            while client.body.count(PING) < 3:
                await asyncio.sleep(0.01)
            yield DONE

        await stream(silent(), closed, ping_s=0.02)({}, client.receive, client.send)
        assert client.body.endswith(DONE)
        assert closed == [1]

    run(test)


def test_work_is_done_or_dropped() -> None:
    async def test() -> None:
        client = Client()

        async def answer() -> int:
            return 7

        assert await until_disconnect(client.receive, answer()) == 7
        dropped = False

        async def long() -> int:
            nonlocal dropped
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                dropped = True
                raise
            return 0

        asyncio.get_running_loop().call_later(0.05, client.left.set)
        assert await until_disconnect(client.receive, long()) is None
        assert dropped

        async def wrong() -> int:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await until_disconnect(Client().receive, wrong())

    run(test)


@pytest.mark.parametrize("padding", [64, 256, 1000])
@pytest.mark.parametrize("event", [None, "response.output_text.delta"])
def test_padding_fills_whole_events(padding: int, event: str | None) -> None:
    for text in ("", "a", "ä" * 7, "\u2028", "x" * 63, "\n" * 100, "🙂" * 9):
        sent = frame({"text": text}, padding, event)
        assert len(sent) % padding == 0
        data = sent.decode().split("data: ", 1)[1]
        assert json.loads(data)["text"] == text


# The door


def gate(app: Any = None, **fields: Any) -> Gate:
    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"in"})

    return Gate(app or inner, ServerConfig(model_names=("m",), **fields))


def scope(path: str = "/v1/models", **more: Any) -> dict[str, Any]:
    return {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "root_path": "",
        "headers": [(b"host", b"localhost:8000")], "query_string": b"", "scheme": "http",
    } | more  # fmt: skip


def call(app: Gate, given: dict[str, Any]) -> Client:
    client = None

    async def test() -> None:
        nonlocal client
        client = Client()
        await app(given, client.receive, client.send)

    run(test)
    return client


@pytest.mark.parametrize(
    "given",
    [
        {"path": "/v1/models", "root_path": "/health"},
        {"path": "/health/v1/models", "root_path": "/health"},
        {"path": "//health"},
        {"path": "/health/"},
        {"path": "/Health"},
        {"path": "/health;x"},
        {"path": "/health\0"},
        {"path": "/health/../v1/models"},
        {"path": "http://localhost/health"},
        {"path": ""},
        {"path": "*"},
        {"path": "/v1/models", "raw_path": b"/health"},
        {"path": "/v1/models", "query_string": b"path=/health"},
    ],
)
def test_the_door_is_shut_unless_the_path_is_exactly_public(given: dict[str, Any]) -> None:
    client = call(gate(api_keys=(KEY,)), scope(**given))
    assert client.sent[0]["status"] == 401
    assert client.body != b"in"


def test_websockets_are_shut_out() -> None:
    client = call(gate(api_keys=(KEY,)), scope("/health", type="websocket"))
    assert client.sent == [{"type": "websocket.close", "code": 1008}]
    client = call(gate(), scope("/v1/realtime", type="websocket"))
    assert client.sent[0]["type"] == "websocket.close"


def test_headers_in_capitals_are_read_too() -> None:
    headers = [(b"Host", b"LOCALHOST"), (b"Authorization", b"bearer alicekey1")]
    assert call(gate(api_keys=(KEY,)), scope(headers=headers)).sent[0]["status"] == 200


def test_two_authorizations_are_none() -> None:
    both = [(b"authorization", b"Bearer alicekey1"), (b"authorization", b"Bearer wrong")]
    headers = [(b"host", b"localhost"), *both]
    assert call(gate(api_keys=(KEY,)), scope(headers=headers)).sent[0]["status"] == 401


@pytest.mark.parametrize(
    "value",
    [b"", b"Bearer", b"Bearer ", b"Basic", b"Basic !!!!", b"Basic //79", b"Digest alicekey1",
     b"alicekey1", b"Bearer\talicekey1", b"Bearer alicekey1, Bearer x", b"\xff\xff \xff",
     b"Basic YWxpY2VrZXkx", b"Basic YWxpY2VrZXkxOg=="],
)  # fmt: skip
def test_credentials_that_are_none(value: bytes) -> None:
    headers = [(b"host", b"localhost"), (b"authorization", value)]
    assert call(gate(api_keys=(KEY,)), scope(headers=headers)).sent[0]["status"] == 401


def test_what_fails_inside_tells_an_id_and_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("secret detail /etc/shadow")

    client = call(gate(broken), scope())
    assert client.sent[0]["status"] == 500
    said = json.loads(client.body)["error"]["message"]
    assert "secret detail" not in said
    request_id = dict(client.sent[0]["headers"])[b"x-request-id"].decode()
    assert request_id in said
    assert request_id in caplog.text
    caplog.clear()


@pytest.mark.parametrize(
    "given", [b"a\r\nb", b"a b", b"", b"x" * 129, b"\xff", b"<script>", b"a\n"]
)
def test_a_request_id_that_could_hurt_is_replaced(given: bytes) -> None:
    headers = [(b"host", b"localhost"), (b"x-request-id", given)]
    client = call(gate(), scope(headers=headers))
    assert dict(client.sent[0]["headers"])[b"x-request-id"] != given
