"""Clients that leave, stall or run out of time: whatever they do, nothing of theirs is kept."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from reference.live_server import Live, serving
from reference.safety_tools import (
    ask,
    chat_body,
    client_of,
    events_of,
    is_openai_error,
    metrics_of,
    post_bytes,
    total,
    wait_until,
    wire,
)
from reference.tiny import Tiny

from forerun.server.keys import ApiKey

pytestmark = pytest.mark.slow  # minutes; `make test-slow`


@pytest.fixture(scope="module")
def slow(tiny: Tiny) -> Iterator[Live]:
    """Steps of 10 ms, so that answers are under way when clients leave."""
    patch = pytest.MonkeyPatch()
    patch.setenv("FORERUN_FAULTS", "step_slow=0.01")
    with serving(tiny.folder, max_num_seqs=8) as running:
        patch.undo()
        yield running
        assert ask(running).status_code == 200
        running.check_idle(30)


LONG_ANSWER = {"max_tokens": 300, "ignore_eos": True}
SHAPES = {
    "chat": ("/v1/chat/completions", chat_body(**LONG_ANSWER)),
    "chat_n": ("/v1/chat/completions", chat_body(n=2, **LONG_ANSWER)),
    "completions": ("/v1/completions", {"prompt": "the quick", **LONG_ANSWER}),
    "batch": ("/v1/completions",
        {"prompt": ["a", "the quick", "der B\u00e4r"], "n": 2, **LONG_ANSWER}),
    "logprobs": ("/v1/completions",
        {"prompt": "the quick", "logprobs": 5, "echo": True, **LONG_ANSWER}),
    "responses": ("/v1/responses",
        {"input": "the quick", "max_output_tokens": 300, "ignore_eos": True}),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("at", [0, 1, 17, 100, 400, 1000, 4000])
def test_a_stream_cut_at_any_byte(slow: Live, shape: str, at: int) -> None:
    path, body = SHAPES[shape]
    with wire(slow) as connection:
        connection.send(post_bytes(path, body | {"stream": True}, slow))
        connection.read(at)
    slow.check_idle(30)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.5])
def test_a_whole_answer_that_nobody_waits_for(slow: Live, shape: str, after_s: float) -> None:
    """The engine must not go on for it: an abandoned answer takes others' steps."""
    path, body = SHAPES[shape]
    before = metrics_of(slow)
    with wire(slow) as connection:
        connection.send(post_bytes(path, body, slow))
        time.sleep(after_s)
    slow.check_idle(30)
    after = metrics_of(slow)
    emitted = total(after, "forerun_spec_num_emitted_total") - total(
        before, "forerun_spec_num_emitted_total"
    )
    assert emitted < 300, "it was answered to the end"


@pytest.mark.parametrize("way", ["reset", "head_only", "half_body", "half_close"])
def test_other_ways_to_leave(slow: Live, way: str) -> None:
    path, body = SHAPES["chat"]
    data = post_bytes(path, body | {"stream": True}, slow)
    for _ in range(5):
        with wire(slow) as connection:
            if way == "head_only":
                connection.send(data[:60])
            elif way == "half_body":
                connection.send(data[:-20])
            else:
                connection.send(data)
                connection.read(500)
            if way == "reset":
                connection.reset()
            elif way == "half_close":
                import socket

                connection._socket.shutdown(socket.SHUT_WR)
                connection.read_to_end()
    slow.check_idle(30)


def test_cancelled_answers_are_counted_as_such(slow: Live) -> None:
    before = metrics_of(slow)
    for _ in range(4):
        with wire(slow) as connection:
            path, body = SHAPES["chat_n"]
            connection.send(post_bytes(path, body | {"stream": True}, slow))
            connection.read(1500)
    slow.check_idle(30)
    after = metrics_of(slow)
    name = 'forerun_requests_finished_total{finished_reason="cancelled"}'
    assert after[name] - before.get(name, 0) == 8
    assert after["forerun_requests_running"] == after["forerun_requests_waiting"] == 0
    assert after["forerun_cache_blocks_used"] == 0


def test_leaving_while_waiting(slow: Live) -> None:
    """Ten more than run at once: those that wait are dropped from the queue."""
    connections = []
    path, body = SHAPES["chat"]
    try:
        for _ in range(18):
            context = wire(slow)
            connection = context.__enter__()
            connections.append((context, connection))
            connection.send(post_bytes(path, body | {"stream": True}, slow))
        wait_until(lambda: slow.engine.load[1] > 0, what="some wait")
        for _, connection in reversed(connections):
            connection.close()
    finally:
        for context, _ in connections:
            context.__exit__(None, None, None)
    slow.check_idle(30)


def test_fifty_streams_that_leave_at_random(slow: Live) -> None:
    dice = random.Random(7)
    plans = [
        (dice.choice(list(SHAPES)), dice.randrange(6000), dice.random() < 0.3) for _ in range(50)
    ]

    def one(plan: tuple[str, int, bool]) -> None:
        shape, size, rude = plan
        path, body = SHAPES[shape]
        with wire(slow) as connection:
            connection.send(post_bytes(path, body | {"stream": True}, slow))
            connection.read(size)
            if rude:
                connection.reset()

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(one, plans))
    slow.check_idle(60)


def test_others_are_not_disturbed_by_those_who_leave(slow: Live, tiny: Tiny) -> None:
    wanted = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    alone = ask(slow, **wanted).json()["choices"][0]["message"]["content"]
    with ThreadPoolExecutor(8) as pool:
        stay = [pool.submit(ask, slow, **wanted) for _ in range(3)]

        def leave(number: int) -> None:
            path, body = SHAPES["chat_n"]
            with wire(slow) as connection:
                connection.send(post_bytes(path, body | {"stream": True}, slow))
                connection.read(300 * number)

        list(pool.map(leave, range(5)))
        for each in stay:
            assert each.result().json()["choices"][0]["message"]["content"] == alone
    slow.check_idle(30)


# Deadlines


def test_a_deadline_for_a_whole_answer(slow: Live) -> None:
    answer = ask(slow, timeout_s=0.3, **LONG_ANSWER)
    assert answer.status_code == 504
    assert is_openai_error(answer)
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    slow.check_idle(30)


@pytest.mark.parametrize("shape", ["chat", "chat_n", "batch"])
def test_a_deadline_for_a_stream(slow: Live, shape: str) -> None:
    path, body = SHAPES[shape]
    with client_of(slow) as client:
        answer = client.post(path, json=body | {"stream": True, "timeout_s": 0.3})
    assert answer.status_code == 200
    events = events_of(answer.text)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
    slow.check_idle(30)


def test_a_deadline_for_a_response(slow: Live) -> None:
    path, body = SHAPES["responses"]
    with client_of(slow) as client:
        assert client.post(path, json=body | {"timeout_s": 0.3}).status_code == 504
        answer = client.post(path, json=body | {"stream": True, "timeout_s": 0.3})
    last = json.loads(events_of(answer.text)[-1])
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "deadline_exceeded"
    slow.check_idle(30)


@pytest.mark.parametrize("timeout_s", [1e-9, 0.001, 0.01])
def test_a_deadline_that_is_over_at_once(slow: Live, timeout_s: float) -> None:
    for _ in range(5):
        assert ask(slow, timeout_s=timeout_s, **LONG_ANSWER).status_code == 504
        streamed = ask(slow, timeout_s=timeout_s, stream=True, **LONG_ANSWER)
        if streamed.status_code == 200:
            assert events_of(streamed.text)[-1] == "[DONE]"
        else:  # over before the stream began
            assert streamed.status_code == 504
    slow.check_idle(30)


def test_nobody_gets_more_time_than_the_server_gives(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_FAULTS", "step_slow=0.05")
    with serving(tiny.folder, server={"request_timeout_s": 0.5}) as live:
        assert ask(live, timeout_s=1000.0, **LONG_ANSWER).status_code == 504
        assert ask(live, **LONG_ANSWER).status_code == 504
        live.check_idle(30)


def test_waiting_has_its_own_limit(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_FAULTS", "step_slow=0.03")
    with serving(tiny.folder, server={"queue_timeout_s": 0.7}, max_num_seqs=1) as live:
        with ThreadPoolExecutor(4) as pool:
            first = pool.submit(ask, live, max_tokens=150, ignore_eos=True)
            wait_until(lambda: live.engine.load[0] == 1)
            waiting = pool.submit(ask, live)
            streamed = pool.submit(ask, live, stream=True)
            late = waiting.result()
            told = events_of(streamed.result().text)
            assert first.result().status_code == 200, "what runs has no limit of waiting"
        assert late.status_code == 503
        assert is_openai_error(late)
        assert int(late.headers["retry-after"]) >= 1
        assert "error" in json.loads(told[-2])
        assert told[-1] == "[DONE]"
        live.check_idle(30)


# Readers that stall


def test_a_reader_that_stalls_is_given_up(tiny: Tiny) -> None:
    """The deadline holds for a stream that nobody reads too; its place is somebody's limit."""
    key = ApiKey.of("stalling-reader", "stalling", 1)
    server = {"stream_padding": 65536, "request_timeout_s": 3.0, "api_keys": (key,), "ping_s": 1.0}
    with serving(tiny.folder, server=server) as live:
        authorization = "Authorization: Bearer stalling-reader"
        with wire(live, receive_bytes=4096) as connection:
            body = chat_body(stream=True, max_tokens=400, ignore_eos=True, logprobs=True)
            connection.send(post_bytes("/v1/chat/completions", body, live, authorization))
            connection.read(100)
            admission = live.server.service.generations.admission
            wait_until(lambda: live.engine.load[0] == 0, what="the engine is done")
            wait_until(
                lambda: admission.num_under_way == 0, 30, "the place of a stalled reader is free"
            )
        assert ask(live, key="stalling-reader").status_code == 200


def test_a_reader_that_stalls_does_not_hold_up_the_end(tiny: Tiny) -> None:
    server = {"stream_padding": 65536, "drain_timeout_s": 1.0}
    with (
        serving(tiny.folder, server=server) as live,
        wire(live, receive_bytes=4096) as connection,
    ):
        body = chat_body(stream=True, max_tokens=400, ignore_eos=True)
        connection.send(post_bytes("/v1/chat/completions", body, live))
        connection.read(100)
        live.terminate()
        live.join(60)


def test_slow_readers_get_everything(tiny: Tiny) -> None:
    with serving(tiny.folder, server={"stream_padding": 4096}) as live:
        body = chat_body(stream=True, max_tokens=200, ignore_eos=True, seed=1)
        whole = ask(live, max_tokens=200, ignore_eos=True, seed=1).json()
        said = []
        with (
            client_of(live) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    said.append(chunk["choices"][0]["delta"].get("content") or "")
                    time.sleep(0.005)
        assert "".join(said) == whole["choices"][0]["message"]["content"]
        live.check_idle()


def test_many_at_once_all_answered(live: Live) -> None:
    async def run() -> list[int]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=live.url, timeout=120, limits=limits) as client:
            asked = [
                client.post("/v1/chat/completions", json=chat_body(f"{n}", stream=n % 2 == 0))
                for n in range(100)
            ]
            return [each.status_code for each in await asyncio.gather(*asked)]

    assert set(asyncio.run(run())) == {200}
    live.check_idle(30)
