"""Bodies, messages, paths and methods that are none: refused in one shape, and never a 5xx."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from reference.api_help import check_error, post, stream_of, user
from reference.live_server import Live
from reference.tiny import Tiny

pytestmark = pytest.mark.slow  # minutes; `make test-slow`

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PATHS = (CHAT, COMPLETIONS)
CONTEXT = 512  # of the tiny model


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {
        CHAT: {"messages": user(), "max_tokens": 2},
        COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
        RESPONSES: {"input": "hi", "max_output_tokens": 2},
    }[path]
    return {**asked, **fields}


# --- bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PATHS, RESPONSES, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "raw",
    [
        b"", b" ", b"{", b"[]", b"null", b"1", b'"x"', b"{]", b"{'a': 1}", b"{} {}", b"\x00",
        b'{"a": undefined}', b'{"a": NaN}', b"\xff\xfe\xfd", b'{"a": "\xff"}', b'{"a": 01}',
        b'{"a": "\n"}', b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"1" * 10_000 + b"}",
        b"<xml/>", b"prompt=hi",
    ],
    ids=lambda raw: repr(raw[:16]),
)  # fmt: skip
def test_bodies_that_are_no_json_objects(live: Live, path: str, raw: bytes) -> None:
    check_error(post(live, path, content=raw), 400)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x", ""]
)
def test_other_content_types_are_415(live: Live, path: str, kind: str) -> None:
    raw = json.dumps(body_for(path)).encode()
    error = check_error(post(live, path, content=raw, headers={"content-type": kind}), 415)
    assert "application/json" in error["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_spellings_of_the_content_type(live: Live, kind: str) -> None:
    raw = json.dumps(body_for(CHAT)).encode()
    headers = {"content-type": kind}
    assert post(live, CHAT, content=raw, headers=headers).status_code == 200


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
def test_json_is_utf_8(live: Live, encoding: str) -> None:
    """RFC 8259: a parser that guesses others reads what a filter before it could not."""
    raw = json.dumps(body_for(CHAT, messages=user("ä")), ensure_ascii=False).encode(encoding)
    check_error(post(live, CHAT, content=raw), 400)


def test_deep_nesting_is_refused_wherever_it_is(live: Live) -> None:
    deep: Any = 1
    for _ in range(100):
        deep = {"a": deep}
    for fields in ({"unknown": deep}, {"messages": [deep]}, {"metadata": deep}):
        check_error(post(live, CHAT, body_for(CHAT, **fields)), 400)
    check_error(post(live, RESPONSES, body_for(RESPONSES, metadata=deep)), 400)


def test_fields_given_twice_do_no_harm(live: Live) -> None:
    raw = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":2,"max_tokens":1}'
    assert post(live, CHAT, content=raw).status_code in (200, 400)


SURROGATE = "\\ud800"
SURROGATES: list[tuple[str, str]] = [
    (CHAT, '{"messages":[{"role":"user","content":"S"}],"max_tokens":1}'),
    (CHAT, '{"messages":[{"role":"S","content":"a"}],"max_tokens":1}'),
    (CHAT, '{"messages":[{"role":"user","content":[{"type":"text","text":"S"}]}],"max_tokens":1}'),
    (CHAT, '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"stop":"S"}'),
    (CHAT, '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"model":"S"}'),
    (CHAT, '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"cache_salt":"S"}'),
    (CHAT, '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"S":1}'),
    (CHAT, '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"logit_bias":{"S":1}}'),
    (
        CHAT,
        '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,'
        '"structured_outputs":{"choice":["S"]}}',
    ),
    (
        CHAT,
        '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,'
        '"structured_outputs":{"json":{"const":"S"}}}',
    ),
    (
        CHAT,
        '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"tools":[{"type":"function",'
        '"function":{"name":"f","description":"S"}}]}',
    ),
    (
        CHAT,
        '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,'
        '"chat_template_kwargs":{"a":"S"}}',
    ),
    (COMPLETIONS, '{"prompt":"S","max_tokens":1}'),
    (COMPLETIONS, '{"prompt":["S"],"max_tokens":1}'),
    (COMPLETIONS, '{"prompt":"a","max_tokens":1,"bad_words":["S"]}'),
    (COMPLETIONS, '{"prompt":"a","max_tokens":1,"structured_outputs":{"regex":"S"}}'),
    (COMPLETIONS, '{"prompt":"a","max_tokens":1,"structured_outputs":{"grammar":"S"}}'),
    (RESPONSES, '{"input":"S","max_output_tokens":1}'),
    (RESPONSES, '{"input":[{"role":"user","content":"S"}],"max_output_tokens":1}'),
    (RESPONSES, '{"input":"a","instructions":"S","max_output_tokens":1}'),
    (RESPONSES, '{"input":"a","metadata":{"a":"S"},"max_output_tokens":1}'),
    (RESPONSES, '{"input":"a","metadata":{"S":"a"},"max_output_tokens":1}'),
    (
        RESPONSES,
        '{"input":"a","max_output_tokens":1,"tools":[{"type":"function","name":"f",'
        '"description":"S"}]}',
    ),
    ("/tokenize", '{"prompt":"S"}'),
    ("/tokenize", '{"messages":[{"role":"user","content":"S"}]}'),
]


@pytest.mark.parametrize(("path", "raw"), SURROGATES)
def test_halves_of_surrogate_pairs_never_break_the_server(live: Live, path: str, raw: str) -> None:
    answer = post(live, path, content=raw.replace("S", SURROGATE).encode())
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        check_error(answer, answer.status_code)
    if '"stream"' not in raw:
        streamed = raw.replace("S", SURROGATE).rstrip("}") + "}" * (
            len(raw) - len(raw.rstrip("}")) - 1
        )
        if path.startswith("/v1/"):
            answer = post(live, path, content=(streamed + ',"stream":true}').encode())
            assert answer.status_code < 500, answer.text
            assert b"internal_error" not in answer.content


# --- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [], {}, "hi", 5, [5], ["hi"], [None], [{}],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "alien", "content": "x"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
        [{"role": "assistant", "content": None}],
        [{"role": "user", "content": "x", "tool_calls": [{}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        [{"role": "assistant", "content": "x", "tool_calls": "y"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
        [{"role": "tool", "content": "x", "tool_call_id": 5}],
    ],
    ids=lambda each: str(each)[:48],
)  # fmt: skip
def test_messages_that_are_none(live: Live, messages: Any) -> None:
    error = check_error(post(live, CHAT, {"messages": messages, "max_tokens": 2}), 400)
    assert (error["param"] or "").startswith("messages"), error


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "file", "video_url"])
def test_parts_that_are_no_text_are_refused(live: Live, kind: str) -> None:
    part = {"type": kind, kind: {"url": f"{live.url}/health"}}
    for path, asked in (
        (CHAT, {"messages": [{"role": "user", "content": [part]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [part]}]}),
    ):
        error = check_error(post(live, path, asked), 400)
        assert kind in error["message"]
        assert error["param"] in ("messages", "input")


def test_errors_of_a_response_name_its_own_field(live: Live) -> None:
    for item in (
        {"role": "user"},
        {"role": "alien", "content": "x"},
        {"role": "user", "content": 5},
    ):
        error = check_error(post(live, RESPONSES, {"input": [item]}), 400)
        assert (error["param"] or "").startswith("input"), error


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_roles_that_are_known(live: Live, role: str) -> None:
    messages = [{"role": role, "content": "x"}, *user()]
    assert post(live, CHAT, {"messages": messages, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "options",
    [{"tools": 1}, {"messages": 1}, {"add_generation_prompt": True}, {"bos_token": "x"}, 5, []],
)
def test_variables_of_the_template_that_are_ours(live: Live, options: Any) -> None:
    asked = body_for(CHAT, chat_template_kwargs=options)
    error = check_error(post(live, CHAT, asked), 400)
    assert error["param"] == "chat_template_kwargs", error


# --- paths and methods ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/v1", "/v1/", "/v1/chat", "/v1/chat/completions/", "/v1/embeddings", "/x", "//v1/models",
     "/v1/completions/1", "/%2e%2e/etc/passwd", "/dashboard/../app.py", "/V1/models", "/docs"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_paths_that_are_not_there(live: Live, method: str, path: str) -> None:
    error = check_error(httpx.request(method, live.url + path), 404)
    assert error["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in (CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/detokenize")),
        *(("POST", path) for path in ("/v1/models", "/health", "/ready", "/version", "/metrics")),
        ("PUT", CHAT), ("DELETE", CHAT), ("PATCH", CHAT), ("OPTIONS", CHAT),
        ("DELETE", "/v1/models/tiny"), ("TRACE", "/health"),
    ],
)  # fmt: skip
def test_methods_that_a_path_does_not_take(live: Live, method: str, path: str) -> None:
    answer = httpx.request(method, live.url + path)
    error = check_error(answer, 405)
    assert error["code"] == "method_not_allowed"
    assert answer.headers["allow"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/v1/models", "/openapi.json"])
def test_head_is_get_without_a_body(live: Live, path: str) -> None:
    head, get = httpx.head(live.url + path), httpx.get(live.url + path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


def test_head_of_what_is_not_there_has_no_body(live: Live) -> None:
    for path, status in (("/nothing", 404), (CHAT, 405)):
        answer = httpx.head(live.url + path)
        assert answer.status_code == status
        assert answer.content == b""


def test_errors_say_nothing_of_the_inside(live: Live) -> None:
    for answer in (
        post(live, CHAT, content=b"{"),
        post(live, CHAT, {"messages": 5}),
        post(live, CHAT, body_for(CHAT, structured_outputs={"regex": "("})),
    ):
        assert "Traceback" not in answer.text
        assert "/work/" not in answer.text
        assert "pydantic" not in answer.text.lower()
        assert answer.headers["x-request-id"]


def test_what_clients_get_wrong_is_no_error_of_the_server(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """Else anybody fills the log with tracebacks, and with pieces of what was sent (S16)."""
    for asked in (
        body_for(CHAT, temperature=-1),
        body_for(CHAT, logit_bias={"x": 1}),
        body_for(CHAT, messages=[{"role": "alien", "content": "x"}]),
        body_for(CHAT, structured_outputs={"regex": "(secret"}),
    ):
        assert post(live, CHAT, asked).status_code == 400
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []
    assert "secret" not in caplog.text


def test_the_clients_request_id_comes_back(live: Live) -> None:
    for asked in (body_for(CHAT), {}):
        answer = post(live, CHAT, asked, headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
    answer = post(live, CHAT, {}, headers={"x-request-id": "evil id \x7f"})
    assert answer.headers["x-request-id"] != "evil id \x7f"


def test_nothing_is_held_after_all_this(live: Live, tiny: Tiny) -> None:
    events = stream_of(live, CHAT, body_for(CHAT))
    assert events.is_done
    live.check_idle()
