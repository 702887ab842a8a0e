"""The end: in order, within its time, with an error for whoever is cut off, and exit code 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from reference.live_server import Live, serving
from reference.safety_tools import (
    ask,
    chat_body,
    client_of,
    events_of,
    is_openai_error,
    post_bytes,
    wait_until,
    wire,
)
from reference.tiny import Tiny

pytestmark = pytest.mark.slow  # minutes; `make test-slow`

LONG_ANSWER = {"max_tokens": 300, "ignore_eos": True}


class Reading:
    """A stream that is read in a thread of its own."""

    def __init__(self, live_url: str, path: str = "/v1/chat/completions", **fields: object) -> None:
        self.lines: list[str] = []
        self.error: Exception | None = None
        body = (chat_body() if "chat" in path else {}) | {"stream": True} | fields

        def read() -> None:
            try:
                with httpx.stream("POST", live_url + path, json=body, timeout=120) as answer:
                    for line in answer.iter_lines():
                        if line:
                            self.lines.append(line)
            except Exception as error:  # noqa: BLE001
                self.error = error

        self.thread = threading.Thread(target=read)
        self.thread.start()
        wait_until(lambda: len(self.lines) > 3 or not self.thread.is_alive())

    def end(self) -> list[str]:
        self.thread.join(120)
        assert self.error is None, self.error
        return events_of("\n".join(self.lines))


@pytest.fixture
def slow(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORERUN_FAULTS", "step_slow=0.01")

    def make(**server: object):
        return serving(tiny.folder, server=server)

    return make


def refused(live: Live) -> None:
    for path, body in (
        ("/v1/chat/completions", chat_body()),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
    ):
        with client_of(live) as client:
            answer = client.post(path, json=body)
        assert answer.status_code == 503
        assert is_openai_error(answer)
        assert int(answer.headers["retry-after"]) >= 1


def test_what_runs_is_finished(slow) -> None:
    with slow(drain_timeout_s=60.0) as live:
        whole = {}
        waiting = threading.Thread(target=lambda: whole.update(ask(live, **LONG_ANSWER).json()))
        streams = [Reading(live.url, **LONG_ANSWER), Reading(live.url, n=2, **LONG_ANSWER)]
        waiting.start()
        wait_until(lambda: live.server.service.generations.admission.num_under_way == 3)
        live.terminate()
        with client_of(live) as client:
            wait_until(lambda: client.get("/ready").status_code == 503)
            assert client.get("/ready").json()["status"] == "draining"
            assert client.get("/health").status_code == 200
            assert client.get("/metrics").status_code == 200
        refused(live)
        for stream in streams:
            events = stream.end()
            assert events[-1] == "[DONE]"
            assert "error" not in json.loads(events[-2])
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        waiting.join()
        assert whole["usage"]["completion_tokens"] == 300
        live.join()
        assert live.engine.load == (0, 0, 0)


def test_what_is_not_done_in_time_hears_of_it(slow) -> None:
    with slow(drain_timeout_s=0.5) as live:
        chat = Reading(live.url, **LONG_ANSWER)
        prompts = Reading(live.url, "/v1/completions", prompt=["a", "b"], n=2, **LONG_ANSWER)
        response = Reading(live.url, "/v1/responses", input="a", ignore_eos=True)
        live.terminate()
        for stream in (chat, prompts):
            events = stream.end()
            assert events[-1] == "[DONE]"
            error = json.loads(events[-2])["error"]
            assert "shutting down" in error["message"]
        events = response.end()
        assert json.loads(events[-1])["type"] == "response.failed"
        live.join()
        assert live.engine.load == (0, 0, 0)
        live.engine.call(lambda core: core.check_integrity()).result(10)


def test_a_whole_answer_that_is_cut_is_503(slow) -> None:
    with slow(drain_timeout_s=0.3) as live:
        found = []
        asking = threading.Thread(target=lambda: found.append(ask(live, **LONG_ANSWER)))
        asking.start()
        wait_until(lambda: live.engine.load[0] == 1)
        live.terminate()
        asking.join(60)
        assert found[0].status_code == 503
        assert is_openai_error(found[0])
        live.join()


def test_those_that_wait_are_finished_too(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_FAULTS", "step_slow=0.01")
    with serving(tiny.folder, server={"drain_timeout_s": 60.0}, max_num_seqs=1) as live:
        found: list[int] = []
        threads = [
            threading.Thread(
                target=lambda: found.append(ask(live, max_tokens=40, ignore_eos=True).status_code)
            )
            for _ in range(4)
        ]
        for each in threads:
            each.start()
        wait_until(lambda: live.server.service.generations.admission.num_under_way == 4)
        live.terminate()
        for each in threads:
            each.join(60)
        assert found == [200] * 4
        live.join()


def test_an_idle_server_ends_at_once(tiny: Tiny) -> None:
    with serving(tiny.folder) as live, wire(live) as idle, wire(live) as half:
        idle.ask("GET /health")
        assert idle.reply().status == 200
        half.send("GET /health HTTP/1.1\r\nHost: ")
        began_s = time.monotonic()
        live.terminate()
        live.join(30)
        assert time.monotonic() - began_s < 20, "connections at rest held up the end"


def test_a_second_signal_ends_it_now(slow) -> None:
    with slow(drain_timeout_s=600.0) as live:
        with wire(live) as connection:
            body = chat_body(stream=True, max_tokens=480, ignore_eos=True)
            connection.send(post_bytes("/v1/chat/completions", body, live))
            connection.read(300)
            live.terminate()
            live.terminate()
            live.join(60)
        wait_until(lambda: live.engine.load == (0, 0, 0), what="the engine is idle")


def test_clients_that_leave_while_draining(slow) -> None:
    with slow(drain_timeout_s=600.0) as live:
        with wire(live) as connection:
            body = chat_body(stream=True, max_tokens=480, ignore_eos=True)
            connection.send(post_bytes("/v1/chat/completions", body, live))
            connection.read(300)
            live.terminate()
        live.join(60)
        assert live.engine.load == (0, 0, 0)


# As a process


class Process:
    """`forerun serve` as people start it."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        self.errors: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forerun", "serve", "--model", str(folder), "--port", "0",
             "--threads", "1", *options],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "COLUMNS": "200", **environment},
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        wait_until(lambda: self.url or self.process.poll() is not None, 120, "it listens")
        assert self.url, self.text

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self.errors.extend(lines)

    @property
    def text(self) -> str:
        return "".join(self.errors)

    @property
    def url(self) -> str:
        words = [word for word in self.text.split() if word.startswith("http://")]
        return words[0].rstrip(")") if words else ""

    def end(self, sent: int) -> int:
        self.process.send_signal(sent)
        code = self.process.wait(90)
        self.reader.join(30)
        return code

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.reader.join(30)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_with_0(tiny: Tiny, sent: int) -> None:
    with Process(tiny.folder, "--served-model-name", "tiny") as served:
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=chat_body(), timeout=60)
        assert answer.status_code == 200
        assert served.end(sent) == 0
        assert "Traceback" not in served.text


def test_a_process_with_streams_ends_with_0(tiny: Tiny) -> None:
    options = ("--shutdown-timeout", "1")
    with Process(tiny.folder, *options, FORERUN_FAULTS="step_slow=0.05") as served:
        stream = Reading(served.url, **LONG_ANSWER)
        assert served.end(signal.SIGTERM) == 0
        events = stream.end()
        assert events[-1] == "[DONE]"
        assert "shutting down" in events[-2]
        assert "Traceback" not in served.text


def test_a_client_that_does_not_read_leaves_no_socket_open(tiny: Tiny) -> None:
    """What it was sent waits in a buffer; the end of the server does not wait for that."""
    with (
        serving(tiny.folder, server={"stream_padding": 1 << 16}) as live,
        wire(live, receive_bytes=4096) as connection,
    ):
        body = chat_body(stream=True, **LONG_ANSWER)
        connection.send(post_bytes("/v1/chat/completions", body, live))
        connections = live.server.server_state.connections
        wait_until(lambda: any(each.transport.get_write_buffer_size() for each in connections))
        transports = [each.transport for each in connections]
        live.terminate()
        live.terminate()
        live.join()
        assert [each.get_extra_info("socket").fileno() for each in transports] == [-1]
