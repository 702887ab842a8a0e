"""Responses: the newer endpoint says what a chat says, as events that clients can follow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest
from reference.api_help import LONG_S, check_error, openai_client, post, user
from reference.live_server import Live, serving
from reference.tiny import make_tiny

CHAT, PATH = "/v1/chat/completions", "/v1/responses"
CLOCK: dict[str, Any] = {
    "type": "object",
    "properties": {"is_utc": {"type": "boolean"}},
    "required": ["is_utc"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "name": "clock", "parameters": CLOCK, "strict": True},
    {"type": "function", "name": "ping", "parameters": NOTHING, "strict": False},
]


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A context in which descriptions of tools have room."""
    tiny = make_tiny(tmp_path_factory.mktemp("roomy") / "model", max_positions=4096)
    with serving(tiny.folder) as running:
        yield running
        running.check_idle()


def events_of(live: Live, **fields: Any) -> list[dict[str, Any]]:
    """Stream a response and read its events off the wire."""
    body = {"input": "the fox", "max_output_tokens": 10, **fields, "stream": True}
    answer = post(live, PATH, body)
    assert answer.status_code == 200, answer.text
    events = []
    for each in answer.content.decode("ascii").removesuffix("\n\n").split("\n\n"):
        if each.startswith(":") or each == "data: [DONE]":
            continue
        head, data = each.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        events.append(event)
    return events


def chat_text(live: Live, messages: list[dict[str, Any]], **fields: Any) -> str:
    answer = post(live, CHAT, {"messages": messages, "max_tokens": 12, "temperature": 0, **fields})
    return answer.json()["choices"][0]["message"]["content"]


def test_a_response_says_what_a_chat_says(live: Live) -> None:
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
    with openai_client(live) as client:
        plain = client.responses.create(**asked, input="the fox")
        assert plain.output_text == chat_text(live, user("the fox"))
        told = client.responses.create(**asked, input="the fox", instructions="be brief")
        system = {"role": "system", "content": "be brief"}
        assert told.output_text == chat_text(live, [system, *user("the fox")])
        items = client.responses.create(
            **asked,
            input=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "input_text", "text": "the fox"}]},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "more"},
            ],
        )
    history = [
        system, *user("the fox"), {"role": "assistant", "content": "yes"}, *user("more"),
    ]  # fmt: skip
    assert items.output_text == chat_text(live, history)


def test_an_output_can_be_sent_back(live: Live) -> None:
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
    with openai_client(live) as client:
        first = client.responses.create(**asked, input="the fox")
        again = client.responses.create(
            **asked,
            input=[  # type: ignore[arg-type]
                {"role": "user", "content": "the fox"},
                *[item.model_dump() for item in first.output],
                {"role": "user", "content": "more"},
            ],
        )
    history = [
        *user("the fox"), {"role": "assistant", "content": first.output_text}, *user("more"),
    ]  # fmt: skip
    assert again.output_text == chat_text(live, history)


def test_the_shape_of_a_response(live: Live) -> None:
    with openai_client(live) as client:
        answer = client.responses.create(
            model="tiny", input="the fox", max_output_tokens=6, metadata={"a": "b"}, top_p=0.9
        )
    assert answer.object == "response"
    assert answer.id.startswith("resp_")
    assert answer.metadata == {"a": "b"}
    assert answer.top_p == 0.9
    assert answer.status in ("completed", "incomplete")
    assert (answer.status == "incomplete") == (answer.incomplete_details is not None)
    assert answer.usage is not None
    count = post(live, "/tokenize", {"messages": user("the fox")}).json()["count"]
    assert answer.usage.input_tokens == count
    assert answer.usage.output_tokens <= 6
    assert answer.usage.total_tokens == count + answer.usage.output_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


def test_a_response_that_was_cut_is_incomplete(live: Live) -> None:
    body = {"input": "a", "max_output_tokens": 3, "ignore_eos": True}
    answer = post(live, PATH, body).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 3
    assert events_of(live, **body)[-1]["type"] == "response.incomplete"


def check_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check the order of a stream's events; give the response of the last."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    for event in (events[0], events[1]):
        assert event["response"]["status"] == "in_progress"
        assert event["response"]["output"] == []
        assert event["response"]["usage"] is None
    final = events[-1]["response"]
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    opened: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    for event in events[2:-1]:
        at = event["output_index"]
        match event["type"]:
            case "response.output_item.added":
                assert at == len(opened)
                opened[at] = event["item"]
                texts[at] = ""
                assert event["item"]["status"] == "in_progress"
            case "response.content_part.added":
                assert event["part"] == {"type": "output_text", "text": "", "annotations": []}
            case "response.output_text.delta" | "response.function_call_arguments.delta":
                assert event["item_id"] == opened[at]["id"]
                texts[at] += event["delta"]
            case "response.output_text.done":
                assert event["text"] == texts[at]
            case "response.function_call_arguments.done":
                assert event["arguments"] == texts[at]
            case "response.content_part.done":
                assert event["part"]["text"] == texts[at]
            case "response.output_item.done":
                assert event["item"] == final["output"][at]
            case other:
                pytest.fail(f"{other} is no known event")
    assert kinds.count("response.output_item.done") == len(opened) == len(final["output"])
    return final


def test_the_events_of_a_message(live: Live) -> None:
    for fields in ({"temperature": 0}, {"temperature": 1, "seed": 3}, {"max_output_tokens": 1}):
        events = events_of(live, **fields)
        final = check_events(events)
        body = {"input": "the fox", "max_output_tokens": 10, **fields}
        if fields.get("temperature") != 0 and "seed" not in fields:
            continue
        whole = post(live, PATH, body).json()
        assert [_bare(item) for item in final["output"]] == [
            _bare(item) for item in whole["output"]
        ]
        assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def test_an_item_that_was_cut_is_not_called_complete(live: Live) -> None:
    answer = post(live, PATH, {"input": "a", "max_output_tokens": 4, "ignore_eos": True}).json()
    assert answer["status"] == "incomplete"
    assert answer["output"][-1]["status"] == "incomplete"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "clock"}], ids=str)
def test_function_calls(roomy: Live, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "input": "the time?", "tools": TOOLS, "tool_choice": choice,
        "parallel_tool_calls": False, "temperature": 0, "max_output_tokens": 150,
    }  # fmt: skip
    with openai_client(roomy) as client:
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            for _ in stream:
                pass
            final = stream.get_final_response()
        (call,) = [item for item in whole.output if item.type == "function_call"]
        (streamed,) = [item for item in final.output if item.type == "function_call"]
        assert (call.name, call.arguments) == (streamed.name, streamed.arguments)
        if call.name == "clock":
            jsonschema_rs.validate(CLOCK, json.loads(call.arguments))
        if isinstance(choice, dict):
            assert call.name == "clock"
        back = client.responses.create(
            model="tiny", max_output_tokens=4, tools=TOOLS, tool_choice="none",
            input=[  # type: ignore[arg-type]
                {"role": "user", "content": "the time?"},
                call.model_dump(exclude={"parsed_arguments"}),
                {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
            ],
        )  # fmt: skip
    assert back.usage is not None
    assert back.usage.input_tokens > whole.usage.input_tokens - 1000
    check_events(
        events_of(
            roomy, input="the time?", tools=TOOLS, tool_choice=choice, temperature=0,
            parallel_tool_calls=False, max_output_tokens=150,
        )
    )  # fmt: skip


def test_the_openai_client_streams_text(live: Live) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "input": "the fox", "temperature": 0, "max_output_tokens": 12,
    }  # fmt: skip
    with openai_client(live) as client:
        whole = client.responses.create(**asked)
        said = ""
        for event in client.responses.create(**asked, stream=True):
            if event.type == "response.output_text.delta":
                said += event.delta
    assert said == whole.output_text


@pytest.mark.parametrize(
    ("name", "value"), [("previous_response_id", "resp_1"), ("background", True)]
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_needs_memory_is_refused(live: Live, name: str, value: Any, stream: bool) -> None:
    body = {"input": "a", "max_output_tokens": 2, name: value, "stream": stream}
    assert check_error(post(live, PATH, body), 400, name)["code"] == "unsupported_parameter"


def test_responses_cannot_be_fetched(live: Live) -> None:
    with openai_client(live) as client, pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    check_error(httpx.get(f"{live.url}{PATH}/resp_1", timeout=LONG_S), 404)


def test_fields_of_chats_are_obeyed_here_and_checked_as_there(live: Live) -> None:
    seeded = {"input": "the fox", "max_output_tokens": 8, "seed": 5, "top_k": 20}
    answers = [post(live, PATH, seeded) for _ in range(2)]
    texts = [each.json()["output"][0]["content"][0]["text"] for each in answers]
    assert texts[0] == texts[1]
    assert texts[0] == chat_text(
        live, user("the fox"), temperature=1, seed=5, top_k=20, max_tokens=8
    )
    for name, value in (
        ("top_k", "x"), ("seed", 1.5), ("stop", ["a"] * 5), ("logit_bias", {"x": 1}), ("n", 0),
        ("min_p", 2), ("temperature", -1), ("top_p", 0), ("response_format", 5),
        ("structured_outputs", []),
    ):  # fmt: skip
        answer = post(live, PATH, {"input": "a", "max_output_tokens": 2, name: value})
        error = check_error(answer, 400)
        assert (error["param"] or "").startswith(name), error


def test_obeyed_fields_are_not_named_as_ignored(live: Live) -> None:
    body = {"input": "a", "max_output_tokens": 2, "seed": 5, "top_k": 20, "include": ["x"]}
    answer = post(live, PATH, body)
    assert answer.headers["x-forerun-ignored-fields"] == "include"


def test_more_than_one_answer_is_refused(live: Live) -> None:
    """There is one output; several samples would be written into each other."""
    for stream in (True, False):
        body = {"input": "a", "max_output_tokens": 8, "n": 2, "seed": 5, "stream": stream}
        check_error(post(live, PATH, body), 400, "n")


@pytest.mark.parametrize(
    "items",
    [
        [], [{"type": "reasoning", "summary": []}], [5], ["a"], [{}], [{"type": "message"}],
        [{"type": "item_reference", "id": "x"}], [{"type": ["x"]}], [{"type": "function_call"}],
        [{"type": "function_call_output"}], [{"role": "alien", "content": "x"}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "input_text"}]}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        [{"type": "function_call", "name": "f", "arguments": "{", "call_id": "a"}],
        [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": 5}],
        [{"type": "function_call_output", "call_id": 5, "output": "x"}],
        [{"type": "function_call_output", "call_id": "a", "output": 5}],
        5, {}, None, "",
    ],
    ids=lambda each: str(each)[:48],
)  # fmt: skip
def test_inputs_that_are_none(live: Live, items: Any) -> None:
    for stream in (True, False):
        body = {"input": items, "max_output_tokens": 2, "stream": stream}
        answer = post(live, PATH, body)
        if items == "":
            assert answer.status_code in (200, 400)
            continue
        check_error(answer, 400)


@pytest.mark.parametrize(
    "raw",
    [
        '{"input":"a","max_output_tokens":2,"metadata":{"a":"\\ud800"}}',
        '{"input":"a","max_output_tokens":2,"metadata":{"a":1e999}}',
        '{"input":"a","max_output_tokens":2,"tool_choice":"none",'
        '"tools":[{"type":"function","name":"f","description":"\\udfff"}]}',
        '{"input":"a","max_output_tokens":2,"tool_choice":"none",'
        '"tools":[{"type":"function","name":"f","parameters":{"type":"object","x":-1e999}}]}',
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_echoed_can_be_written(live: Live, raw: str, stream: bool) -> None:
    content = raw[:-1] + (',"stream":true}' if stream else "}")
    answer = post(live, PATH, content=content.encode())
    assert answer.status_code in (200, 400), answer.text
    for token in ("Infinity", "NaN"):
        assert token not in answer.text


def test_what_clients_send_besides_is_taken(roomy: Live) -> None:
    """As Codex sends it."""
    body = {
        "model": "tiny", "instructions": "be brief", "max_output_tokens": 2,
        "input": [{"type": "message", "role": "user",
                   "content": [{"type": "input_text", "text": "a"}]},
                  {"type": "reasoning", "summary": [], "encrypted_content": "x"}],
        "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "text": {"verbosity": "low"}, "service_tier": None, "truncation": "disabled",
    }  # fmt: skip
    answer = post(roomy, PATH, body)
    assert answer.status_code == 200, answer.text
    assert b'"type":"response.completed"' in answer.content or (
        b'"type":"response.incomplete"' in answer.content
    )


def test_nulls_are_taken(live: Live) -> None:
    names = [
        "instructions",
        "temperature",
        "top_p",
        "stream",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "text",
        "previous_response_id",
        "background",
        "metadata",
        "store",
        "user",
        "timeout_s",
        "speculative",
        "include",
        "reasoning",
        "truncation",
        "prompt",
        "conversation",
        "max_tool_calls",
        "seed",
        "top_k",
    ]
    body = {"input": "a", "max_output_tokens": 2, **dict.fromkeys(names)}
    answer = post(live, PATH, body)
    assert answer.status_code == 200, answer.text
    assert "x-forerun-ignored-fields" not in answer.headers
