"""Too much, too slow, too deep, not HTTP at all: refused in words, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from reference.live_server import Live, serving
from reference.safety_tools import (
    ask,
    chat_body,
    client_of,
    is_openai_error,
    post_bytes,
    wait_until,
    wire,
)
from reference.tiny import Tiny

pytestmark = pytest.mark.slow  # minutes; `make test-slow`


@pytest.fixture(scope="module")
def small(tiny: Tiny) -> Iterator[Live]:
    """A server with small limits and little patience."""
    limits = {
        "max_body_bytes": 20_000, "header_timeout_s": 1.0, "body_timeout_s": 1.5, "max_prompts": 4,
        "max_samples": 2,
    }  # fmt: skip
    with serving(tiny.folder, server=limits) as running:
        yield running
        assert ask(running).status_code == 200
        running.check_idle()


def post_head(live: Live, *headers: str) -> str:
    lines = ["POST /v1/completions HTTP/1.1", f"Host: 127.0.0.1:{live.port}",
             "Content-Type: application/json", *headers, "", ""]  # fmt: skip
    return "\r\n".join(lines)


# S5: bodies


def test_a_body_that_says_it_is_too_big_is_not_read(small: Live) -> None:
    with wire(small) as connection:
        connection.send(post_head(small, "Content-Length: 20001"))
        reply = connection.reply()
    assert reply.status == 413
    assert reply.json()["error"]["code"] == "request_too_large"
    assert reply.headers["connection"] == "close"


@pytest.mark.parametrize("length", ["99999999999999999999999", "9" * 18])
def test_a_body_that_says_it_is_enormous(small: Live, length: str) -> None:
    with wire(small) as connection:
        connection.send(post_head(small, f"Content-Length: {length}"))
        assert connection.reply().status in (400, 413)


@pytest.mark.parametrize("length", ["-1", "1e3", "0x10", "+5", "", "1,1", "1\r\nContent-Length: 2"])
def test_a_length_that_is_none(small: Live, length: str) -> None:
    with wire(small) as connection:
        connection.send(post_head(small, f"Content-Length: {length}"))
        connection.send(b"{}")
        data = connection.read_to_end()
    assert data.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413", b"HTTP/1.1 408"))


def test_a_chunked_body_that_grows_too_big(small: Live) -> None:
    with wire(small) as connection:
        connection.send(post_head(small, "Transfer-Encoding: chunked"))
        chunk = b"%x\r\n%b\r\n" % (4096, b" " * 4096)
        for _ in range(5):
            connection.send(chunk)
        reply = connection.reply()
    assert reply.status == 413
    assert reply.headers["connection"] == "close"


def test_a_body_of_just_the_right_size_is_read(small: Live) -> None:
    body = json.dumps({"prompt": "the quick", "max_tokens": 2}).encode()
    body += b" " * (20_000 - len(body))
    with wire(small) as connection:
        connection.send(post_head(small, f"Content-Length: {len(body)}").encode() + body)
        assert connection.reply().status == 200
    with wire(small) as connection:
        connection.send(post_head(small, "Transfer-Encoding: chunked"))
        for start in range(0, len(body), 5000):
            part = body[start : start + 5000]
            connection.send(b"%x\r\n%b\r\n" % (len(part), part))
        connection.send(b"0\r\n\r\n")
        assert connection.reply().status == 200


def test_a_body_that_stops_coming(small: Live) -> None:
    with wire(small) as connection:
        connection.send(post_head(small, "Content-Length: 100") + '{"prompt"')
        reply = connection.reply()
    assert reply.status == 408
    assert reply.headers["connection"] == "close"


def test_a_body_that_drips(small: Live) -> None:
    """The whole body has 1.5 s, not each of its bytes."""
    began_s = time.monotonic()
    with wire(small) as connection:
        connection.send(post_head(small, "Content-Length: 1000"))
        try:
            while time.monotonic() - began_s < 12:
                connection.send(b" ")
                time.sleep(0.3)
        except OSError:
            return  # cut: what is wanted
        pytest.fail("a byte now and then kept a request alive")


def test_a_client_that_leaves_in_its_body_is_no_failure_of_ours(
    small: Live, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    for _ in range(3):
        with wire(small) as connection:
            connection.send(post_head(small, "Content-Length: 100") + '{"prompt"')
            time.sleep(0.1)
    time.sleep(0.5)
    assert [each for each in caplog.records if each.levelname in ("ERROR", "CRITICAL")] == []


# S5: heads


@pytest.mark.parametrize(
    "begin", [b"", b"GET", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "]
)
def test_a_head_that_stops_coming(small: Live, begin: bytes) -> None:
    began_s = time.monotonic()
    with wire(small) as connection:
        connection.send(begin)
        connection.read_to_end()
    assert time.monotonic() - began_s < 20


def test_a_head_that_drips(small: Live) -> None:
    began_s = time.monotonic()
    with wire(small) as connection:
        connection.send("GET /health HTTP/1.1\r\nHost: localhost\r\n")
        try:
            while time.monotonic() - began_s < 12:
                connection.send(f"X-{time.monotonic_ns()}: 1\r\n")
                time.sleep(0.2)
        except OSError:
            return
        pytest.fail("a header now and then kept a connection alive")


def test_a_second_head_that_drips(small: Live) -> None:
    """The limit holds for every request of a connection."""
    with wire(small) as connection:
        connection.ask("GET /health")
        assert connection.reply().status == 200
        began_s = time.monotonic()
        try:
            while time.monotonic() - began_s < 12:
                connection.send(b"G" if time.monotonic() - began_s < 0.1 else b"E")
                time.sleep(0.2)
        except OSError:
            return
        pytest.fail("a byte now and then kept a connection alive")


def test_a_head_that_drips_behind_a_long_answer(small: Live) -> None:
    """Pipelined: the next head begins while the answer before is still being made."""
    with wire(small) as connection:
        body = {"prompt": "the quick", "max_tokens": 200, "ignore_eos": True}
        connection.send(post_bytes("/v1/completions", body, small) + b"GET /hea")
        assert connection.reply("POST").status == 200
        began_s = time.monotonic()
        try:
            while time.monotonic() - began_s < 12:
                connection.send(b"x")
                time.sleep(0.2)
        except OSError:
            return
        pytest.fail("a byte now and then kept a connection alive")


def test_a_connection_at_rest_is_kept_longer_than_a_head_may_take(small: Live) -> None:
    with wire(small) as connection:
        for _ in range(3):
            connection.ask("GET /health")
            assert connection.reply().status == 200
            time.sleep(1.4)


def test_a_request_that_takes_longer_than_a_head_may_is_finished(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_FAULTS", "step_hangs=3:2")
    with serving(tiny.folder, server={"header_timeout_s": 0.5}) as live:
        assert ask(live, max_tokens=20).status_code == 200


def test_many_headers(small: Live) -> None:
    with wire(small) as connection:
        connection.ask("GET /v1/models", *(f"X-{i}: 1" for i in range(150)))
        reply = connection.reply()
    assert reply.status == 431
    assert is_openai_error(reply)


def test_a_huge_header(small: Live) -> None:
    with wire(small) as connection:
        try:
            connection.ask("GET /v1/models", "X-Big: " + "a" * 200_000)
        except OSError:
            return
        data = connection.read_to_end()
    assert data == b"" or data.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


def test_a_huge_target(small: Live) -> None:
    with wire(small) as connection:
        try:
            connection.ask("GET /" + "a" * 200_000)
        except OSError:
            return
        data = connection.read_to_end()
    assert data == b"" or data.startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 100, b"\xff" * 1000, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 50,
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET / HTTP/1.1\r\n: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX\x00Y: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n folded: 1\r\n\r\n",
        b"GET /\xc3\xa4 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x55" * 300,  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"ZZ\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n\0\0\0\0",
    ],
)  # fmt: skip
def test_garbage(small: Live, garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with wire(small) as connection:
        connection.send(garbage)
        data = connection.read_to_end()
    assert b" 500 " not in data.partition(b"\r\n")[0]
    assert ask(small).status_code == 200
    assert [each for each in caplog.records if each.levelname in ("ERROR", "CRITICAL")] == []


def test_a_bad_chunk_after_an_early_answer(small: Live, caplog: pytest.LogCaptureFixture) -> None:
    """The answer (404) comes before the body, and then the body turns out to be garbage."""
    with wire(small) as connection:
        connection.send(
            "POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        assert connection.reply("POST").status == 404
        connection.send(b"ZZZZ\r\n")
        connection.read_to_end()
    assert [each for each in caplog.records if each.levelname in ("ERROR", "CRITICAL")] == []


def test_requests_behind_each_other_are_answered_in_order(small: Live) -> None:
    with wire(small) as connection:
        body = {"prompt": "the quick", "max_tokens": 3}
        connection.send(
            post_bytes("/v1/completions", body, small)
            + f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{small.port}\r\n\r\n".encode()
            + post_bytes("/v1/completions", body | {"max_tokens": -5}, small)
            + post_bytes("/v1/completions", body, small, "Connection: close")
        )
        data = connection.read_to_end()
    codes = [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]
    assert codes == [200, 200, 400, 200]


def test_a_request_hidden_in_a_body_is_no_request(small: Live) -> None:
    inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with wire(small) as connection:
        connection.send(
            post_head(small, f"Content-Length: {len(inner)}", "Transfer-Encoding: chunked",
                      "Connection: close").encode() + b"0\r\n\r\n" + inner
        )  # fmt: skip
        data = connection.read_to_end()
    assert b"max_model_len" not in data


def test_many_idle_connections_leave_room(small: Live) -> None:
    sockets = []
    try:
        for _ in range(200):
            each = socket.create_connection(("127.0.0.1", small.port), timeout=30)
            sockets.append(each)
        assert ask(small).status_code == 200
    finally:
        for each in sockets:
            each.close()


def test_too_many_open_requests_are_told_when_to_come_back(tiny: Tiny) -> None:
    """R1: in the shape that clients know, and probes still get through."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    head += b"Content-Type: application/json\r\n\r\n"
    with serving(tiny.folder, server={"max_open_requests": 3}) as live:
        open_ones: list[socket.socket] = []
        for _ in range(3):
            each = socket.create_connection(("127.0.0.1", live.port), timeout=30)
            each.sendall(head)  # and no body
            open_ones.append(each)
        try:
            with client_of(live) as client:
                health = client.get("/health")
                answer = client.post("/v1/completions", json={"prompt": "a"})
        finally:
            for each in open_ones:
                each.close()
        assert answer.status_code == 503
        assert is_openai_error(answer)
        assert int(answer.headers["retry-after"]) >= 1
        assert health.status_code == 200


def is_served(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_connections_above_the_most_are_closed_and_the_others_served(tiny: Tiny) -> None:
    with serving(tiny.folder, server={"max_connections": 5}) as live, client_of(live) as client:
        assert client.get("/health").status_code == 200  # a connection that is kept
        many = [socket.create_connection(("127.0.0.1", live.port), timeout=30) for _ in range(8)]
        try:
            gone = 0
            for each in many[4:]:
                with contextlib.suppress(ConnectionResetError):
                    gone += each.recv(1) == b""
                    continue
                gone += 1
            assert gone == 4
            assert client.get("/health").status_code == 200
        finally:
            for each in many:
                each.close()
        with client_of(live) as another:
            wait_until(lambda: is_served(another))


# S5: JSON


def post(live: Live, content: bytes, path: str = "/v1/completions", **headers: str):
    with client_of(live) as client:
        return client.post(
            path, content=content, headers={"Content-Type": "application/json"} | headers
        )


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"null", b"[]", b'"a"', b"1", b"nan", b"{'prompt': 'a'}", b'{"prompt": "a",}',
        b'{"prompt": "a"} x', b'{"prompt": "\xff"}', b"\xff\xfe{\0", b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "temperature": -NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "seed": 1e400}', b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "stop": "\\udfff"}',
        b"[" * 5000, b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b'{"prompt": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"prompt": "a", "x": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"prompt": "a", "logit_bias": {"1": NaN}}', b'{"prompt": [1e2]}', b'{"prompt": [true]}',
    ],
)  # fmt: skip
def test_what_is_no_json_or_no_request(small: Live, content: bytes) -> None:
    answer = post(small, content)
    assert answer.status_code == 400
    assert is_openai_error(answer)
    assert len(answer.text) < 2000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "metadata": {"a": "\ud800"}}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "instructions": "\ud800"}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "metadata": {"a": "1e999"}}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "tool_choice": "none", "tools": [
            {"type": "function", "name": "f", "description": "\ud800", "parameters": {}}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": "\ud800"}]}),
        ("/v1/chat/completions", chat_body("\ud800")),
        ("/v1/chat/completions", chat_body(model="\ud800")),
        ("/v1/chat/completions", chat_body(cache_salt="\ud800")),
        ("/v1/chat/completions", chat_body(stop=["\ud800"])),
        ("/v1/chat/completions", chat_body(bad_words=["\ud800"])),
        ("/v1/chat/completions", chat_body(chat_template_kwargs={"a": "\ud800"})),
        ("/v1/chat/completions", chat_body(chat_template_kwargs={"\ud800": 1})),
        ("/v1/chat/completions", chat_body(structured_outputs={"choice": ["\ud800"]})),
        ("/v1/chat/completions", chat_body(**{"\ud800": 1})),
        ("/v1/chat/completions", chat_body(user="\ud800")),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/tokenize", {"messages": [{"role": "user"}]}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"messages": [{"role": "user", "content": {"a": 1}}]}),
        ("/detokenize", {"tokens": [2**70]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/v1/models/%F0", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_half_characters_and_the_infinite_fail_nothing(
    small: Live, path: str, body: dict | None, stream: bool
) -> None:
    """What a client sends is echoed here and there; JSON that cannot be written is no excuse."""
    if body is None:
        with client_of(small) as client:
            assert client.get(path).status_code < 500
        return
    content = json.dumps(body | ({"stream": True} if stream and path.startswith("/v1") else {}))
    answer = post(small, content.replace('"1e999"', "1e999").encode(), path)
    assert answer.status_code < 500
    assert "Infinity" not in answer.text
    assert "NaN" not in answer.text


def test_another_content_type_is_refused(small: Live) -> None:
    for kind in ("text/plain", "multipart/form-data; boundary=x", "application/xml", ""):
        answer = post(small, b'{"prompt": "a"}', **{"Content-Type": kind})
        assert answer.status_code == 415


# S6


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3}, {"n": 0}, {"n": -1}, {"n": 2**63}, {"n": 1.5}, {"n": "2"}, {"n": True},
        {"best_of": 2}, {"best_of": 10**9}, {"stop": ["a"] * 5}, {"stop": "a" * 257}, {"stop": [1]},
        {"logit_bias": {str(i): 1 for i in range(1025)}}, {"logit_bias": {"99999": 1}},
        {"logit_bias": {"-1": 1}}, {"logit_bias": {"x": 1}}, {"logit_bias": {"1": 1e308}},
        {"top_logprobs": 21, "logprobs": True}, {"top_logprobs": -1, "logprobs": True},
        {"max_tokens": -1}, {"max_tokens": 10**9}, {"max_tokens": 2**64},
        {"temperature": -1}, {"temperature": "1"}, {"top_p": 0}, {"top_p": 1.1},
        {"top_k": -2**63}, {"min_p": 2}, {"repetition_penalty": 0}, {"repetition_penalty": -1},
        {"presence_penalty": 1e9}, {"stop_token_ids": [99999]}, {"stop_token_ids": [-1]},
        {"stop_token_ids": [1] * 1025}, {"allowed_token_ids": []}, {"allowed_token_ids": [2**40]},
        {"bad_words": ["a"] * 129}, {"prompt_logprobs": 10**6}, {"min_tokens": 10**6},
        {"timeout_s": 0}, {"timeout_s": -1}, {"timeout_s": 1e9}, {"cache_salt": "a" * 257},
        {"speculative": {"max_draft": 10**6}}, {"speculative": {"max_draft": -1}},
        {"speculative": {"x": 1}}, {"priority": 10**12}, {"seed": 2**65}, {"user": "a" * 257},
        {"structured_outputs": {"choice": ["a"] * 5000}}, {"messages": []},
        {"messages": [{"role": "user", "content": "a"}] * 5000}, {"messages": ["a"]},
        {"messages": 1},
    ],
)  # fmt: skip
def test_caps_of_a_chat(live: Live, fields: dict) -> None:
    if fields == {"n": 3}:
        fields = {"n": 9}
    answer = ask(live, **fields)
    assert answer.status_code == 400, answer.text
    assert is_openai_error(answer)


def test_caps_of_prompts(small: Live) -> None:
    with client_of(small) as client:
        for prompt in (["a"] * 5, [[1]] * 5, [], [[]], "", [-1], [304], [2**40], [1] * 600):
            answer = client.post("/v1/completions", json={"prompt": prompt})
            assert answer.status_code == 400, prompt
            assert is_openai_error(answer)
        answer = client.post("/v1/completions", json={"prompt": "a", "n": 3})
        assert answer.status_code == 400
        answer = client.post("/v1/completions", json={"prompt": ["a"] * 4, "n": 2, "max_tokens": 2})
        assert len(answer.json()["choices"]) == 8
    small.check_idle()


# S10


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}},
        {"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/x"}},
        {"type": "input_image", "image_url": "http://127.0.0.1:9/x.png"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "input_file", "file_url": "http://127.0.0.1:9/x"},
        {"type": "text", "text": {"url": "http://127.0.0.1:9/x"}},
    ],
)  # fmt: skip
def test_nothing_is_fetched(live: Live, part: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(live) as client:
        client.get("/health")  # the client's own connection is there before sockets are watched
        opened: list[object] = []
        real = socket.socket.connect

        def connect(self: socket.socket, address: object) -> None:
            if not (isinstance(address, tuple) and address[1] == live.port):
                opened.append(address)
            real(self, address)

        monkeypatch.setattr(socket.socket, "connect", connect)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: opened.append(a) or [])
        messages = [{"role": "user", "content": [part]}]
        asked = [
            client.post("/v1/chat/completions", json={"messages": messages}),
            client.post("/v1/responses", json={"input": messages}),
            client.post("/tokenize", json={"messages": messages}),
        ]
        schema = {"$ref": "http://127.0.0.1:9/schema.json"}
        remote = {"type": "json_schema", "json_schema": {"schema": schema}}
        asked.append(client.post("/v1/chat/completions", json=chat_body(response_format=remote)))
    assert [each.status_code for each in asked] == [400] * 4
    assert opened == []


# What a body of allowed size may cost


WIDE = 1_200_000  # empty objects in 4 MB
WIDE_BODIES = {
    "prompts": b'{"prompt": [' + b"{}," * WIDE + b"{}]}",
    "prompts_of_lists": b'{"prompt": [' + b"[]," * WIDE + b"[]]}",
    "prompts_of_texts": b'{"prompt": [' + b'"",' * WIDE + b"1]}",
    "prompts_of_tokens": b'{"prompt": [' + b"1," * WIDE + b'""]}',
    "tools": b'{"messages": [{}], "tools": [' + b"1," * WIDE + b"1]}",
    "allowed": b'{"prompt": "a", "allowed_token_ids": [' + b'"",' * 1_000_000 + b"1]}",
    "biases": b'{"prompt": "a", "logit_bias": {'
    + b",".join(b'"%d":""' % i for i in range(300_000))
    + b"}}",
    "unknown": b'{"prompt": "a", ' + b",".join(b'"x%d":1' % i for i in range(300_000)) + b"}",
    "tokens": b'{"tokens": [' + b'"",' * 1_000_000 + b"1]}",
    "stops": b'{"prompt": "a", "stop": [' + b"1," * WIDE + b"1]}",
}  # fmt: skip


@pytest.mark.parametrize("name", WIDE_BODIES)
def test_a_wide_body_does_not_hold_up_the_others(live: Live, name: str) -> None:
    """4 MB of what nobody wants: refused at its first fault, not with a list of a million."""
    import threading

    path = {"tools": "/v1/chat/completions", "tokens": "/detokenize"}.get(name, "/v1/completions")
    waits, stop = [], threading.Event()

    def watch() -> None:
        with client_of(live) as client:
            while not stop.is_set():
                began_s = time.monotonic()
                client.get("/health")
                waits.append(time.monotonic() - began_s)
                time.sleep(0.01)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        answer = post(live, WIDE_BODIES[name], path)
    finally:
        stop.set()
        watching.join()
    assert answer.status_code in (200, 400, 413)
    assert len(answer.content) < 5000
    assert max(waits) < 15, f"/health waited {max(waits):.1f} s"  # it was a minute once
