"""What tests of safety need: raw connections, requests by hand, metrics as numbers, load."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from reference.live_server import Live

from forerun.server.keys import ApiKey

ALICE, BOB = "alice-secret-1", "bob-secret-22"
KEYS = (ApiKey.of(ALICE, "alice"), ApiKey.of(BOB, "bob"))
GENEROUS_S = 60.0


def client_of(live: Live, key: str | None = None, **options: Any) -> httpx.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=live.url, headers=headers, timeout=GENEROUS_S, **options)


def chat_body(text: str = "the quick brown fox", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8} | fields


def ask(live: Live, text: str = "the quick brown fox", key: str | None = None, **fields: Any):
    """Ask for a chat completion and return the HTTP answer."""
    with client_of(live, key) as client:
        return client.post("/v1/chat/completions", json=chat_body(text, **fields))


def wait_until(true: Callable[[], Any], seconds: float = GENEROUS_S, what: str = "") -> None:
    end_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end_s, f"never happened: {what or true}"
        time.sleep(0.02)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """A connection on which anything may be written."""

    def __init__(self, live: Live, receive_bytes: int | None = None) -> None:
        self._socket = socket.socket()
        if receive_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._socket.settimeout(GENEROUS_S)
        host = live.config.host if live.config.host != "0.0.0.0" else "127.0.0.1"
        self._socket.connect((host, live.port))
        self._peer = f"{host}:{live.port}"

    def send(self, data: bytes | str) -> None:
        self._socket.sendall(data.encode("latin-1") if isinstance(data, str) else data)

    def ask(self, line: str, *headers: str, host: str | None = "", body: bytes = b"") -> None:
        """Send a request with this request line, these headers and a fitting Host."""
        own = [] if host is None else [f"Host: {host or self._peer}"]
        if body:
            own += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        head = "\r\n".join([f"{line} HTTP/1.1", *own, *headers, "", ""])
        self.send(head.encode("latin-1") + body)

    def reply(self, method: str = "GET") -> Reply:
        answer = http.client.HTTPResponse(self._socket, method=method)
        try:
            answer.begin()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, headers, answer.read())
        finally:
            answer.close()

    def read(self, size: int) -> bytes:
        """Read exactly so many bytes, or up to the end."""
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            if not more:
                break
            data += more
        return data

    def read_to_end(self) -> bytes:
        """Read until the server closes; b"" too if it cuts the connection."""
        data = b""
        try:
            while more := self._socket.recv(65536):
                data += more
        except ConnectionResetError:
            pass
        return data

    def close(self) -> None:
        self._socket.close()

    def reset(self) -> None:
        """Go away rudely."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._socket.close()


@contextmanager
def wire(live: Live, **options: Any) -> Iterator[Wire]:
    connection = Wire(live, **options)
    try:
        yield connection
    finally:
        connection.close()


def post_bytes(path: str, body: dict[str, Any], live: Live, *headers: str) -> bytes:
    """Write a whole POST as it goes over the wire."""
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: 127.0.0.1:{live.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + data


def is_openai_error(answer: Any) -> bool:
    error = answer.json().get("error")
    return isinstance(error, dict) and set(error) == {"message", "type", "param", "code"}


def metrics_of(live: Live) -> dict[str, float]:
    """Read /metrics: name{labels} without model_name, to value."""
    with client_of(live) as client:
        text = client.get("/metrics").text
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([a-z_:0-9]+)(?:\{(.*)\})? (\S+)", line)
        if match is None:
            continue
        labels = [
            each for each in re.findall(r'[a-z_]+="[^"]*"', match[2] or "")
            if not each.startswith("model_name=")
        ]  # fmt: skip
        found[match[1] + ("{" + ",".join(labels) + "}" if labels else "")] = float(match[3])
    return found


def total(metrics: dict[str, float], name: str) -> float:
    """Sum a metric over its labels."""
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name)


def events_of(text: str) -> list[str]:
    """The data of a stream's events."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def stream_text(text: str) -> str:
    """Join what a chat stream says; an error in it is raised."""
    said = []
    for data in events_of(text):
        if data == "[DONE]":
            break
        chunk = json.loads(data)
        if "error" in chunk:
            raise RuntimeError(chunk["error"]["message"])
        said += [each["delta"].get("content") or "" for each in chunk["choices"]]
    return "".join(said)
