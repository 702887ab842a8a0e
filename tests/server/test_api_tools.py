"""Tools: offered, forced, called, answered; the same whole and as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest
from reference.api_help import check_error, openai_client, post, stream_of, user
from reference.live_server import Live, serving
from reference.tiny import make_tiny

pytestmark = pytest.mark.slow  # minutes; `make test-slow`

CHAT = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Köln", "東京"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK: dict[str, Any] = {
    "type": "object",
    "properties": {"is_utc": {"type": "boolean"}},
    "required": ["is_utc"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tell it.", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "clock", "parameters": CLOCK}},
    {"type": "function", "function": {"name": "ping"}},
]
SCHEMAS = {"weather": WEATHER, "clock": CLOCK, "ping": {"type": "object", "maxProperties": 0}}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A context in which descriptions of tools have room."""
    tiny = make_tiny(tmp_path_factory.mktemp("roomy") / "model", max_positions=4096)
    with serving(tiny.folder) as running:
        yield running
        running.check_idle()


def ask(live: Live, **fields: Any) -> dict[str, Any]:
    # The tiny model never calls of itself; one call at a time, so that it comes to an end.
    body = {"messages": user(), "max_tokens": 120, "tools": TOOLS, "parallel_tool_calls": False}
    answer = post(live, CHAT, body | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def check_calls(calls: list[dict[str, Any]]) -> None:
    assert calls
    for call in calls:
        assert call["type"] == "function"
        assert call["id"]
        name = call["function"]["name"]
        jsonschema_rs.validate(SCHEMAS[name], json.loads(call["function"]["arguments"]))
    assert len({call["id"] for call in calls}) == len(calls)


SAMPLING = [{"temperature": 0}, {"temperature": 1, "seed": 4}, {"temperature": 2, "seed": -1}]


def joined(events: Any) -> tuple[str, list[dict[str, Any]]]:
    """Put a stream's calls together as the simplest of clients does."""
    content, calls = "", {}
    for chunk in events.data:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for delta in choice["delta"].get("tool_calls") or ():
                if delta["index"] not in calls:
                    assert delta["id"]
                    assert delta["type"] == "function"
                    assert delta["function"]["name"]
                    calls[delta["index"]] = {"name": delta["function"]["name"], "arguments": ""}
                else:
                    assert not delta.get("id")
                calls[delta["index"]]["arguments"] += delta["function"].get("arguments") or ""
    assert sorted(calls) == list(range(len(calls)))
    return content, [calls[index] for index in sorted(calls)]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_are_calls(roomy: Live, choice: Any, sampling: dict[str, Any]) -> None:
    told = []
    for speculative in (None, {"enabled": False}):
        fields = {"tool_choice": choice, "speculative": speculative, **sampling}
        answer = ask(roomy, **fields)
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["content"] in (None, "")
        check_calls(answer["message"]["tool_calls"])
        assert len(answer["message"]["tool_calls"]) == 1
        told.append(answer["message"]["tool_calls"][0]["function"])
        body = {"messages": user(), "max_tokens": 120, "tools": TOOLS}
        events = stream_of(roomy, CHAT, body | {"parallel_tool_calls": False} | fields)
        content, calls = joined(events)
        assert content == ""
        assert events.finish_reasons() == {0: ["tool_calls"]}
        told += calls
    assert all(each == told[0] for each in told)
    if choice == NAMED:
        assert told[0]["name"] == "weather"


def test_several_calls_in_one_answer(roomy: Live) -> None:
    for seed in range(6):
        fields = {"tool_choice": "required", "parallel_tool_calls": True, "seed": seed}
        answer = ask(roomy, **fields, max_tokens=200)
        body = {"messages": user(), "max_tokens": 200, "tools": TOOLS, **fields}
        _, calls = joined(stream_of(roomy, CHAT, body))
        if answer["finish_reason"] == "tool_calls":
            check_calls(answer["message"]["tool_calls"])
        else:
            assert answer["finish_reason"] == "length"
        given = [call["function"] for call in answer["message"].get("tool_calls", ())]
        assert calls == given


def test_the_openai_client_accumulates_calls(roomy: Live) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": user(), "tools": TOOLS, "tool_choice": "required",
        "parallel_tool_calls": False, "temperature": 0, "max_tokens": 120,
    }  # fmt: skip
    with openai_client(roomy) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
    assert whole.message.tool_calls is not None
    assert final.message.tool_calls is not None
    pairs = zip(whole.message.tool_calls, final.message.tool_calls, strict=True)
    for ours, theirs in pairs:
        assert ours.function.name == theirs.function.name
        assert ours.function.arguments == theirs.function.arguments
        assert theirs.id
    assert whole.finish_reason == final.finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds


@pytest.mark.parametrize("choice", ["auto", None, "none"])
def test_a_model_that_calls_nothing_says_something(roomy: Live, choice: str | None) -> None:
    answer = ask(roomy, tool_choice=choice, seed=3, max_tokens=20)
    assert answer["finish_reason"] in ("length", "stop")
    assert "tool_calls" not in answer["message"]
    assert isinstance(answer["message"]["content"], str)
    body = {"messages": user(), "max_tokens": 20, "tools": TOOLS, "tool_choice": choice, "seed": 3}
    events = stream_of(roomy, CHAT, body | {"parallel_tool_calls": False})
    assert events.texts()[0] == answer["message"]["content"]


def test_tools_that_are_not_offered_are_as_if_there_were_none(roomy: Live) -> None:
    without = ask(roomy, tools=None, parallel_tool_calls=None, seed=3, max_tokens=12)
    for fields in ({"tools": []}, {"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}):
        assert ask(roomy, **fields, seed=3, max_tokens=12) == without


def test_auto_reads_a_call_that_the_model_writes(roomy: Live) -> None:
    """What a model writes by itself, here by a grammar that is no tool choice."""
    text = '<tool_call>\n{"name": "clock", "arguments": {"is_utc": true}}\n</tool_call>'
    fields = {"structured_outputs": {"choice": [text]}, "tool_choice": "auto", "max_tokens": 200}
    answer = ask(roomy, **fields)
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "clock"
    assert json.loads(call["function"]["arguments"]) == {"is_utc": True}
    events = stream_of(roomy, CHAT, {"messages": user(), "tools": TOOLS, **fields})
    assert joined(events) == ("", [call["function"]])


def test_text_before_a_call_is_content(roomy: Live) -> None:
    text = 'Let me see. <tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    fields = {"structured_outputs": {"choice": [text]}, "max_tokens": 200}
    answer = ask(roomy, **fields)
    assert answer["message"]["content"].strip() == "Let me see."
    assert answer["finish_reason"] == "tool_calls"
    content, calls = joined(stream_of(roomy, CHAT, {"messages": user(), "tools": TOOLS, **fields}))
    assert content == answer["message"]["content"]
    assert [each["name"] for each in calls] == ["ping"]


@pytest.mark.parametrize(
    "text",
    [
        "a < b and <tool",
        "<tool_call> is a mark",
        '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "ping", "arguments": \n</tool_call>',
        "<tool_calls>",
        "</tool_call>",
    ],
)
def test_what_is_no_call_is_content_whole_and_streamed_alike(roomy: Live, text: str) -> None:
    fields = {"structured_outputs": {"choice": [text]}, "max_tokens": 200}
    answer = ask(roomy, **fields)
    events = stream_of(roomy, CHAT, {"messages": user(), "tools": TOOLS, **fields})
    content, calls = joined(events)
    assert content == (answer["message"]["content"] or "")
    given = [call["function"] for call in answer["message"].get("tool_calls", ())]
    assert calls == given
    assert events.finish_reasons()[0] == [answer["finish_reason"]]
    if not calls:
        assert content == text
        assert answer["finish_reason"] == "stop"


def test_calls_that_were_cut_are_cut(roomy: Live) -> None:
    for max_tokens in (3, 12, 25):
        fields = {"tool_choice": NAMED, "temperature": 0, "max_tokens": max_tokens}
        answer = ask(roomy, **fields)
        assert answer["finish_reason"] == "length"
        body = {"messages": user(), "tools": TOOLS, **fields}
        events = stream_of(roomy, CHAT, body)
        content, calls = joined(events)
        assert events.finish_reasons() == {0: ["length"]}
        assert content == (answer["message"]["content"] or "")
        assert calls == [each["function"] for each in answer["message"].get("tool_calls", ())]


def test_a_conversation_with_calls_and_their_results(roomy: Live) -> None:
    first = ask(roomy, tool_choice=NAMED, temperature=0)["message"]
    call = first["tool_calls"][0]
    messages = [
        *user("weather?"),
        first,
        {"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "blue"}'},
    ]
    answer = ask(roomy, messages=messages, tool_choice="none", seed=1, max_tokens=8)
    assert answer["finish_reason"] in ("length", "stop")
    # A history without results in it is shorter: both were rendered.
    counts = [
        post(roomy, CHAT, {"messages": history, "max_tokens": 1, "tools": TOOLS}).json()["usage"][
            "prompt_tokens"
        ]
        for history in (messages[:1], messages[:2], messages)
    ]
    assert counts == sorted(set(counts))


def test_results_as_parts_and_empty_arguments(roomy: Live) -> None:
    messages = [
        *user(),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "ping", "arguments": ""}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "pong"}]},
    ]
    assert ask(roomy, messages=messages, tool_choice="none", max_tokens=2)


def test_several_samples_with_calls(roomy: Live) -> None:
    body = {
        "messages": user(), "tools": TOOLS, "tool_choice": "required", "n": 3, "seed": 5,
        "max_tokens": 120, "parallel_tool_calls": False,
    }  # fmt: skip
    choices = post(roomy, CHAT, body).json()["choices"]
    ids = set()
    for choice in choices:
        check_calls(choice["message"]["tool_calls"])
        ids.add(choice["message"]["tool_calls"][0]["id"])
    assert len(ids) == 3


def test_usage_and_logprobs_of_calls(roomy: Live) -> None:
    body = {
        "messages": user(), "tools": TOOLS, "tool_choice": NAMED, "temperature": 0,
        "max_tokens": 120, "logprobs": True,
    }  # fmt: skip
    answer = post(roomy, CHAT, body).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    events = stream_of(roomy, CHAT, body)
    told = [
        entry
        for chunk in events.data
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert [each["token"] for each in told] == [each["token"] for each in content]


WRONG_TOOLS: list[Any] = [
    5,
    {},
    "ping",
    [5],
    [{}],
    [{"type": "function"}],
    [{"type": "web_search"}],
    [{"type": "function", "function": {}}],
    [{"type": "function", "function": {"name": ""}}],
    [{"type": "function", "function": {"name": "a b"}}],
    [{"type": "function", "function": {"name": "x" * 65}}],
    [{"type": "function", "function": {"name": 5}}],
    [{"type": "function", "function": {"name": "f", "parameters": []}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}],
    [{"type": "function", "function": {"name": "f", "description": 5}}],
    [TOOLS[2], TOOLS[2]],
    [
        {"type": "function", "function": {"name": f"f{index}"}}
        for index in range(129)
    ],
]  # fmt: skip


@pytest.mark.parametrize("tools", WRONG_TOOLS, ids=lambda each: str(each)[:60])
@pytest.mark.parametrize("stream", [True, False])
def test_wrong_tools_are_400(roomy: Live, tools: Any, stream: bool) -> None:
    body = {"messages": user(), "max_tokens": 2, "tools": tools, "stream": stream}
    error = check_error(post(roomy, CHAT, body), 400)
    assert (error["param"] or "").startswith("tools"), error


@pytest.mark.parametrize(
    "choice",
    ["always", 5, [], {}, {"type": "function"}, {"type": "function", "function": {"name": "x"}},
     {"type": "allowed_tools"}, {"type": "function", "function": {"name": 5}}],
    ids=str,
)  # fmt: skip
def test_wrong_choices_are_400(roomy: Live, choice: Any) -> None:
    body = {"messages": user(), "max_tokens": 2, "tools": TOOLS, "tool_choice": choice}
    error = check_error(post(roomy, CHAT, body), 400)
    assert (error["param"] or "").startswith("tool_choice"), error


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_calls_cannot_be_forced_without_tools(roomy: Live, choice: Any) -> None:
    for tools in (None, []):
        body = {"messages": user(), "max_tokens": 2, "tools": tools, "tool_choice": choice}
        error = check_error(post(roomy, CHAT, body), 400)
        assert (error["param"] or "").startswith("tool_choice"), error


def test_calls_and_a_format_exclude_each_other(roomy: Live) -> None:
    body = {
        "messages": user(), "max_tokens": 2, "tools": TOOLS, "tool_choice": "required",
        "response_format": {"type": "json_object"},
    }  # fmt: skip
    check_error(post(roomy, CHAT, body), 400, "tool_choice")


def test_a_schema_that_cannot_be_enforced_is_400_where_it_must_be(roomy: Live) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"messages": user(), "max_tokens": 2, "tools": tools, "tool_choice": "required"}
    for stream in (True, False):
        check_error(post(roomy, CHAT, body | {"stream": stream}), 400)


def test_the_openai_client_raises_for_wrong_tools(roomy: Live) -> None:
    with openai_client(roomy) as client, pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="tiny",
            messages=user(),
            tools=[{"type": "function"}],  # type: ignore[typeddict-item]
        )
