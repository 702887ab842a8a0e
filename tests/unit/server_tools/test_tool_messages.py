"""Messages on their way in: arguments become objects, parts become text, the rest is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import InvalidParameter
from forerun.server.tools import (
    FORMATS,
    normalise_messages,
    prepare_messages,
    render_preamble,
    tool_support,
    validate_tools,
)

TOOLS = validate_tools(
    [
        {"type": "function", "function": {"name": "f", "description": "Übung."}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},
    ]
)
PLAIN = tool_support("{% for m in messages %}{{ m.content }}{% endfor %}")


def call(arguments: Any = "{}", **entry: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function, **entry}


def assistant(*calls: Any, content: Any = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def test_messages_are_as_templates_expect_them() -> None:
    given = [
        {"role": "system", "content": "Be brief.", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "é"}]},
        assistant(call('{"b": [1, {"c": null}], "a": "é"}'), call({"x": 1}, id=None), call("")),
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "assistant", "content": "Sunny.", "tool_calls": [], "refusal": None},
        {"role": "assistant", "content": "Yes.", "tool_calls": None},
    ]
    function = {"type": "function"}
    assert normalise_messages(given) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\né"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_1",
                    **function,
                    "function": {"name": "f", "arguments": {"b": [1, {"c": None}], "a": "é"}},
                },
                {**function, "function": {"name": "f", "arguments": {"x": 1}}},
                {"id": "call_1", **function, "function": {"name": "f", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "assistant", "content": "Yes."},
    ]
    assert given[0]["name"] is None  # the request's own stay as they were
    assert given[2]["tool_calls"][1]["id"] is None


def test_mistral_gets_ids_of_nine_letters_and_digits() -> None:
    given = [
        assistant(call(), call(id="abcDEF123")),
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
        {"role": "tool", "tool_call_id": "abcDEF123", "content": ""},
    ]
    first, second, third = normalise_messages(given, FORMATS["mistral"])
    ids = [each["id"] for each in first["tool_calls"]]
    assert [second["tool_call_id"], third["tool_call_id"]] == ids
    assert re.fullmatch("[a-z0-9]{9}", ids[0])
    assert ids[1] == "abcDEF123"


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages must be a list, not str"),
        ([1], "messages[0] must be an object"),
        ([{"role": "user", "content": None}], "messages[0].content is missing"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content is missing"),
        ([{"role": "user", "content": 1}], "messages[0].content must be text or a list"),
        ([{"role": "user", "content": {"a": 1}}], "messages[0].content must be text or a list"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0] must be an object"),
        (
            [{"role": "user", "content": [{"type": "text", "text": ""}, IMAGE]}],
            "messages[0].content[1].type 'image_url' is not supported; only text is",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            "'input_audio' is not supported",
        ),
        ([{"role": "user", "content": [{"type": "file"}]}], "'file' is not supported"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content[0].text must be text"),
        ([{"role": "user", "content": "", "tool_calls": [call()]}], "only the assistant calls"),
        ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls must be a list"),
        ([assistant(1)], "messages[0].tool_calls[0] must be an object"),
        ([assistant(call(type="custom"))], "messages[0].tool_calls[0].type must be 'function'"),
        ([assistant({"type": "function"})], "tool_calls[0].function must be an object"),
        ([assistant({"function": {"name": ""}})], "tool_calls[0].function.name must be text"),
        ([assistant(call("{"))], "tool_calls[0].function.arguments is not JSON"),
        ([assistant(call('{"a": NaN}'))], "NaN is no JSON number"),
        ([assistant(call("[" * 100_000))], "function.arguments is not JSON"),
        ([assistant(call("[1]"))], "function.arguments must be a JSON object, not list"),
        ([assistant(call(7))], "function.arguments must be a JSON object, not int"),
        ([assistant(call(id=7))], "tool_calls[0].id must be text"),
        ([{"role": "tool", "content": "", "tool_call_id": 7}], "messages[0].tool_call_id must be"),
    ],
)
def test_what_is_refused(messages: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        normalise_messages(messages)


KEYS = ["role", "content", "tool_calls", "type", "text", "function", "name", "arguments", "id"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["text", "function", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
)


@settings(deadline=None)
@given(JSON)
def test_nothing_else_is_ever_raised(messages: Any) -> None:
    try:
        found = normalise_messages(messages)
    except InvalidParameter:
        return
    assert all(isinstance(message["content"], str) for message in found)


def test_the_preamble_names_the_tools_and_the_format() -> None:
    text = render_preamble(TOOLS)
    assert '{"type": "function", "function": {"name": "f", "description": "Übung."}}\n' in text
    assert (
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        in text
    )


def test_templates_without_tools_get_all_as_text() -> None:
    messages = normalise_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            assistant(call('{"é": 1}'), call(), content="Let me see."),
            {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
            {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
            assistant(call()),
            {"role": "tool", "tool_call_id": "call_3", "content": "snow"},
        ]
    )
    past = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me see.\n"
            '<tool_call>\n{"name": "f", "arguments": {"é": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        },
        {
            "role": "user",
            "content": "<tool_response>\nsun\n</tool_response>\n"
            "<tool_response>\nrain\n</tool_response>",
        },
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        },
        {"role": "user", "content": "<tool_response>\nsnow\n</tool_response>"},
    ]
    preamble = render_preamble(TOOLS)
    system = {"role": "system", "content": f"Be brief.\n\n{preamble}"}
    assert prepare_messages(messages, TOOLS, PLAIN) == [system, *past]
    assert prepare_messages(messages, (), PLAIN) == [messages[0], *past]
    assert "tool_calls" in messages[2]  # what was given stays as it was


def test_where_the_preamble_goes() -> None:
    preamble = render_preamble(TOOLS)
    user = {"role": "user", "content": "Hi"}
    assert prepare_messages([user], TOOLS, PLAIN) == [{"role": "system", "content": preamble}, user]
    gemma = tool_support("{{ raise_exception('System role not supported') }}")
    assert prepare_messages([user], TOOLS, gemma) == [
        {"role": "user", "content": f"{preamble}\n\nHi"}
    ]


def test_templates_with_tools_get_messages_untouched() -> None:
    source = "{{ tools }}<tool_call>name arguments</tool_call>"
    messages = normalise_messages(
        [{"role": "user", "content": "Hi"}, assistant(call()), {"role": "tool", "content": "x"}]
    )
    assert prepare_messages(messages, TOOLS, tool_support(source + "tool_calls")) == messages
    # As in SmolLM3's, which would leave the calls out.
    written = prepare_messages(messages, TOOLS, tool_support(source))
    assert written[1]["content"].startswith("<tool_call>\n")
    assert "tool_calls" not in written[1]
    assert written[2] == messages[2]
