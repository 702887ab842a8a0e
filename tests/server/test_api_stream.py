"""Event streams, byte by byte: the rules that the strictest of clients rely on."""

from __future__ import annotations

import codecs
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.api_help import LONG_S, Events, openai_client, post, read_events, stream_of, user
from reference.live_server import Live, serving

pytestmark = pytest.mark.slow  # minutes; `make test-slow`

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": user(), "max_tokens": 12, "seed": 3},
    COMPLETIONS: {"prompt": "the quick", "max_tokens": 12, "seed": 3},
}
USAGE = {"stream_options": {"include_usage": True}}


def say(live: Live, text: str) -> dict[str, Any]:
    """Fields of a completion that can say nothing but a text, token by token."""
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 200, "seed": 1}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_the_headers_keep_proxies_from_gathering(live: Live, path: str) -> None:
    body = BODIES.get(path, {"input": "hello", "max_output_tokens": 4}) | {"stream": True}
    with httpx.Client(timeout=LONG_S) as client:
        answer = client.post(f"{live.url}{path}", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("num", [1, 3])
def test_the_order_of_chunks(live: Live, path: str, num: int) -> None:
    events = stream_of(live, path, BODIES[path] | USAGE | {"n": num})
    assert events.is_done
    assert events.raw.endswith(b"data: [DONE]\n\n")
    assert events.raw.count(b"[DONE]") == 1
    # The last with usage and no choices; all before it with exactly one choice and no usage.
    assert events.last["choices"] == []
    assert set(events.last["usage"]) >= {"prompt_tokens", "completion_tokens", "total_tokens"}
    for chunk in events.data[:-1]:
        assert len(chunk["choices"]) == 1
        assert chunk.get("usage") is None
    assert all(len(reasons) == 1 for reasons in events.finish_reasons().values())
    assert sorted(events.finish_reasons()) == list(range(num))
    for index in range(num):
        parts = [c for each in events.data for c in each["choices"] if c["index"] == index]
        assert parts[-1]["finish_reason"] is not None
        assert all(part["finish_reason"] is None for part in parts[:-1])
        if path == CHAT:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in part["delta"] for part in parts[1:])
    heads = [{k: each[k] for k in ("id", "object", "created", "model")} for each in events.data]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["object"] == ("chat.completion.chunk" if path == CHAT else "text_completion")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_usage_comes_only_when_asked_for(live: Live, path: str, options: Any) -> None:
    events = stream_of(live, path, BODIES[path] | {"stream_options": options})
    for chunk in events.data:
        assert chunk["choices"]
        assert chunk.get("usage") is None
        assert "metrics" not in chunk


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("num", [1, 2])
def test_running_usage_grows_to_the_last(live: Live, path: str, num: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream_of(live, path, BODIES[path] | {"stream_options": options, "n": num})
    counts = [chunk["usage"]["completion_tokens"] for chunk in events.data]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 12 * num or "stop" in str(events.finish_reasons())
    assert len({chunk["usage"]["prompt_tokens"] for chunk in events.data}) == 1
    for chunk in events.data:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    last = {**events.last["usage"]}
    before = {**events.data[-2]["usage"]}
    assert last == before


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_running_usage_alone(live: Live, path: str) -> None:
    options = {"continuous_usage_stats": True}
    events = stream_of(live, path, BODIES[path] | {"stream_options": options})
    assert all(chunk["choices"] and chunk["usage"] for chunk in events.data)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_ids_differ_from_answer_to_answer(live: Live, path: str) -> None:
    ids = {stream_of(live, path, BODIES[path]).data[0]["id"] for _ in range(3)}
    assert len(ids) == 3


# --- text --------------------------------------------------------------------------------------

TRICKY = [
    "naïve café",
    "🙂🙃👩‍👩‍👧‍👦 flags 🇩🇪",
    "你好世界 привет мир",
    "line\u2028para\u2029next\u0085end",
    "a\nb\n\nc\r\nd\re",
    'quotes " and \\ and \x00\x1f',
    "data: [DONE]\n\n",
    "data: {}\n\n: ping\n\n",
    "\ufeffbom \ufffd replaced",
    "\U0010ffff\ud7ff\ue000",
    "\U0001d518\U0001d52b\U0001d526",
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("text", TRICKY)
def test_any_character_comes_whole(live: Live, path: str, text: str) -> None:
    body = {**BODIES[path], **say(live, text)}
    events = stream_of(live, path, body)  # read_events decodes ASCII
    assert events.texts() == {0: text}
    for chunk in events.data:
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            piece.encode()  # no half of a surrogate pair
            if "\ufffd" not in text:
                assert "\ufffd" not in piece
    for char in ("\u2028", "\u2029", "\u0085"):
        assert char.encode() not in events.raw


@pytest.mark.parametrize("text", TRICKY)
def test_the_openai_client_reads_any_character(live: Live, text: str) -> None:
    with openai_client(live) as client:
        said = "".join(
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(
                model="tiny", messages=user(), stream=True, max_tokens=200,
                extra_body={"structured_outputs": {"choice": [text]}},
            )
        )  # fmt: skip
    assert said == text


def test_lines_survive_clients_that_split_at_any_line_end(live: Live) -> None:
    events = stream_of(live, CHAT, {"messages": user(), **say(live, TRICKY[3] + TRICKY[4])})
    lines = events.raw.decode().splitlines()
    assert all(line == "" or line.startswith("data: ") for line in lines)
    datas = [line.removeprefix("data: ") for line in lines if line]
    assert [json.loads(each) for each in datas[:-1]] == events.data


@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    max_tokens=st.integers(1, 24),
    text=st.text(max_size=12),
)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.slow
def test_random_answers_are_cut_between_characters(
    live: Live, seed: int, temperature: float, max_tokens: int, text: str
) -> None:
    """A stream of pieces is what an incremental decoder makes of the bytes of the whole."""
    body = {
        "messages": user(text),
        "seed": seed,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "logprobs": True,
    }
    events = stream_of(live, CHAT, body)
    raw = b"".join(
        bytes(entry["bytes"] or ())  # control tokens have no text
        for chunk in events.data
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    )
    assert events.texts()[0] == raw.decode("utf-8", "replace")
    whole = post(live, CHAT, body).json()["choices"][0]
    assert whole["message"]["content"] == events.texts()[0]
    # No piece ends inside a character: what was sent so far is never taken back.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    sent = decoded = ""
    for chunk in events.data:
        for choice in chunk["choices"]:
            sent += choice["delta"].get("content") or ""
            for entry in (choice["logprobs"] or {"content": ()})["content"]:
                decoded += decoder.decode(bytes(entry["bytes"] or ()))
            assert decoded.startswith(sent) or choice["finish_reason"]


# --- before the stream begins --------------------------------------------------------------------

WRONG: list[dict[str, Any]] = [
    {"max_tokens": 10**6},
    {"temperature": -1},
    {"model": "other"},
    {"guided_json": {}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"json": {"type": "nonsense"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
    {"logit_bias": {"99999": 1}},
    {"speculative": {"drafter": "nobody"}},
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
def test_what_is_wrong_is_said_before_a_stream_begins(
    live: Live, path: str, wrong: dict[str, Any]
) -> None:
    answer = post(live, path, BODIES[path] | wrong | {"stream": True})
    assert answer.status_code in (400, 404)
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


# --- gathered and filled-up chunks ----------------------------------------------------------------


@pytest.fixture(scope="module")
def gathering(tiny: Any) -> Any:
    limits = {"stream_interval": 4, "stream_padding": 512, "ping_s": 0.001}
    with serving(tiny.folder, server=limits) as running:
        yield running
        running.check_idle()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_gathered_chunks_say_the_same(live: Live, gathering: Live, path: str) -> None:
    body = BODIES[path] | USAGE | {"logprobs": True if path == CHAT else 1, "n": 2}
    plain, gathered = stream_of(live, path, body), stream_of(gathering, path, body)
    assert gathered.texts() == plain.texts()
    assert gathered.finish_reasons() == plain.finish_reasons()
    assert gathered.last["usage"] == plain.last["usage"]
    assert len(gathered.data) < len(plain.data)
    assert _scores(gathered) == _scores(plain)


def _scores(events: Events) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for chunk in events.data:
        for choice in chunk["choices"]:
            scores = choice["logprobs"] or {}
            values = scores.get("content") or scores.get("token_logprobs") or []
            found.setdefault(choice["index"], []).extend(values)
    return found


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_filled_up_chunks_have_sizes_that_tell_less(gathering: Live, path: str) -> None:
    events = stream_of(gathering, path, BODIES[path])
    for event in events.raw.split(b"\n\n"):
        if event.startswith(b"data: {"):
            assert len(event + b"\n\n") % 512 == 0


def test_pings_are_comments_that_clients_skip(gathering: Live) -> None:
    body = BODIES[CHAT] | {"max_tokens": 64, "stream": True}
    answer = post(gathering, CHAT, body)
    events = read_events(answer, answer.content)
    assert events.is_done
    with openai_client(gathering) as client:
        stream = client.chat.completions.create(
            model="tiny", messages=user(), max_tokens=64, seed=3, stream=True
        )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert said == events.texts()[0]
