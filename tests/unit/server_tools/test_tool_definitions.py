"""Tools and tool_choice, right and wrong: errors name the place."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import InvalidParameter
from forerun.server.tools import Tool, ToolChoice, validate_tool_choice, validate_tools


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_tools_are_taken_as_they_are_without_nulls() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = tool("get_weather", description="Weather.", parameters=parameters, strict=None)
    assert validate_tools([given, tool("g")]) == (
        Tool(
            "get_weather",
            "Weather.",
            parameters,
            tool("get_weather", description="Weather.", parameters=parameters),
        ),
        Tool("g", None, None, tool("g")),
    )
    assert given["function"]["strict"] is None
    assert validate_tools([tool(parameters={})])[0].parameters == {}
    assert validate_tools(None) == validate_tools([]) == ()


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("f", "tools must be a list, not str"),
        ({}, "tools must be a list, not dict"),
        ([1], "tools[0] must be an object, not int"),
        ([tool(), None], "tools[1] must be an object, not null"),
        ([{"type": "retrieval"}], "tools[0].type must be 'function', not 'retrieval'"),
        ([{"function": {"name": "f"}}], "tools[0].type must be 'function', not None"),
        ([{"type": "function"}], "tools[0].function must be an object, not null"),
        ([tool(None)], "tools[0].function.name must be text, not null"),
        ([tool("")], "tools[0].function.name '' must be 1 to 64"),
        ([tool("a b")], "tools[0].function.name 'a b' must be"),
        ([tool("é")], "must be 1 to 64"),
        ([tool("a\n")], "must be 1 to 64"),
        ([tool("a" * 65)], "must be 1 to 64"),
        ([tool("f"), tool("g"), tool("f")], "tools[2].function.name 'f' is taken"),
        ([tool(description=1)], "tools[0].function.description must be text, not int"),
        ([tool(strict="yes")], "tools[0].function.strict must be true or false"),
        ([tool(parameters=[])], "tools[0].function.parameters must be an object, not list"),
        ([tool(parameters={"type": "string"})], "parameters.type must be 'object'"),
        ([tool(parameters={"properties": []})], "parameters.properties must be an object"),
        (
            [tool(parameters={"properties": {"a": 1}})],
            "parameters.properties['a'] must be a schema",
        ),
        ([tool(parameters={"a": float("nan")})], "parameters is no JSON"),
        ([tool(parameters={"a": "x" * 100_000})], "characters, the limit is 100000"),
        ([tool(f"f{index}") for index in range(129)], "tools has 129 entries, the limit is 128"),
    ],
)
def test_wrong_tools(tools: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        validate_tools(tools)


def test_a_schema_that_is_too_deep() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidParameter, match="too deep"):
        validate_tools([tool(parameters=schema)])
    while schema:  # taken apart by hand: freeing it whole would recurse
        schema = schema["items"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        (tool("g"), ToolChoice("named", "g")),
    ],
)
def test_choices(choice: Any, expected: ToolChoice) -> None:
    tools = validate_tools([tool("f"), tool("g")])
    found = validate_tool_choice(choice, tools)
    assert found == expected
    assert found.forces_calls is (expected.mode in ("required", "named"))


def test_choices_without_tools() -> None:
    for choice in (None, "auto", "none"):
        assert validate_tool_choice(choice, ()) == ToolChoice("none")
    for choice in ("required", tool("f")):
        with pytest.raises(InvalidParameter, match="no tools"):
            validate_tool_choice(choice, ())


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("requird", "tool_choice 'requird' is unknown; did you mean 'required'?"),
        (1, "tool_choice must be an object, not int"),
        ({}, "tool_choice.type must be 'function', not None"),
        ({"type": "allowed_tools"}, "tool_choice.type must be 'function'"),
        ({"type": "function"}, "tool_choice.function must be an object"),
        ({"type": "function", "function": {}}, "tool_choice.function.name must be text"),
        (tool("get_wether"), "'get_wether' is none of the tools; did you mean 'get_weather'?"),
    ],
)
def test_wrong_choices(choice: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        validate_tool_choice(choice, validate_tools([tool("get_weather")]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "parameters", "properties", "strict"]),
            inner,
        )
    ),
)


@settings(deadline=None)
@given(JSON, JSON)
def test_nothing_else_is_ever_raised(tools: Any, choice: Any) -> None:
    for call in (lambda: validate_tools(tools), lambda: validate_tool_choice(choice, ())):
        message = ""
        try:
            call()
        except InvalidParameter as error:
            message = str(error)
        assert len(message) < 400
