"""What tests of the API share: clients as people have them, and a reader of raw event streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from reference.live_server import Live

__all__ = [
    "ERROR_KEYS",
    "LONG_S",
    "Events",
    "check_error",
    "openai_client",
    "post",
    "read_events",
    "stream_of",
    "user",
]

LONG_S = 300.0  # busy machines are slow; nothing here depends on how slow
ERROR_KEYS = {"message", "type", "param", "code"}


def user(text: str = "the quick brown fox") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@contextmanager
def openai_client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=LONG_S
    ) as client:
        yield client


def post(live: Live, path: str, body: Any = None, **more: Any) -> httpx.Response:
    """Send JSON, or (`content`) bytes as they are."""
    if "content" in more:
        more.setdefault("headers", {"content-type": "application/json"})
    else:
        more["json"] = body
    return httpx.post(f"{live.url}{path}", timeout=LONG_S, **more)


def check_error(answer: httpx.Response, status: int, param: str | None = ...) -> dict[str, Any]:  # type: ignore[assignment]
    """Check an answer's status and shape; give the error. `param` is checked where given."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == ERROR_KEYS
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    for name in ("param", "code"):
        assert error[name] is None or isinstance(error[name], str)
    if param is not ...:
        assert error["param"] == param, error
    return error


@dataclass
class Events:
    """A stream as it came over the wire."""

    answer: httpx.Response
    raw: bytes
    data: list[dict[str, Any]]  # without [DONE]
    is_done: bool

    def texts(self) -> dict[int, str]:
        """Join what each choice said."""
        said: dict[int, str] = {}
        for chunk in self.data:
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") if "delta" in choice else choice["text"]
                said[choice["index"]] = said.get(choice["index"], "") + (text or "")
        return said

    def finish_reasons(self) -> dict[int, list[str]]:
        """List the finish reasons that are not null, by choice."""
        found: dict[int, list[str]] = {}
        for chunk in self.data:
            for choice in chunk["choices"]:
                found.setdefault(choice["index"], [])
                if choice["finish_reason"] is not None:
                    found[choice["index"]].append(choice["finish_reason"])
        return found

    @property
    def last(self) -> dict[str, Any]:
        return self.data[-1]


def read_events(answer: httpx.Response, raw: bytes) -> Events:
    """Take a stream apart as strictly as the strictest client."""
    assert raw.endswith(b"\n\n")
    data: list[dict[str, Any]] = []
    is_done = False
    for event in raw.decode("ascii").removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):
            continue
        assert not is_done, "something came after [DONE]"
        assert event.startswith("data: ")
        assert "\n" not in event
        if event == "data: [DONE]":
            is_done = True
            continue
        data.append(json.loads(event.removeprefix("data: ")))
    return Events(answer, raw, data, is_done)


def stream_of(live: Live, path: str, body: dict[str, Any]) -> Events:
    """Stream an answer and read it whole."""
    with (
        httpx.Client(timeout=LONG_S) as client,
        client.stream("POST", f"{live.url}{path}", json={**body, "stream": True}) as answer,
    ):
        raw = answer.read()
    assert answer.status_code == 200, raw
    return read_events(answer, raw)
