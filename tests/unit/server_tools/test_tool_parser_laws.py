"""For any text: pieces do not matter, nothing is lost, whole calls are found."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_reading import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, NAMES, joined, read

from forerun.server.tools import ArgumentsDelta, CallStarted, ContentDelta, ToolFormat

FORMATS = [HERMES, LLAMA, MISTRAL, MISTRAL_ARGS]
PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *('{"name": "f", "arguments": ', '{"name": "get-all", "parameters": ', '{"arguments": {}'),
    *('{"a": "</tool_call>"}', '{"é": [1, {"b": "\\"}"}]}', "{}", "}", "]", "[", "{", ", ", ": "),
    *('"name": "f"', '"', "\\", "f", "get-all", "\n", " ", ";", "<", "[", "🦊", "1e5", "null", "x"),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)
JSON_OBJECTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=6) | st.sampled_from(PIECES),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
    max_size=3,
)


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@settings(deadline=None)
@given(text=TEXTS, truncated=st.booleans(), data=st.data())
def test_pieces_do_not_matter(
    format: ToolFormat, text: str, truncated: bool, data: st.DataObject
) -> None:
    expected = read(format, [text], truncated)
    assert read(format, cut(text, data), truncated) == expected
    assert read(format, list(text), truncated) == expected


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@settings(deadline=None)
@given(text=TEXTS)
def test_what_goes_out_is_the_text_in_order(format: ToolFormat, text: str) -> None:
    """Deltas are disjoint pieces of the text; without calls they are all of it."""
    deltas, complete = read(format, [text])
    if not any(isinstance(delta, CallStarted) for delta in deltas):
        assert deltas == ([ContentDelta(text)] if text else [])
        assert complete
        return
    # Arguments written before the name are announced after it, so their order may differ.
    place = 0
    for delta in deltas:
        if not isinstance(delta, CallStarted) and '"arguments": {}' not in text:
            place = text.index(delta.text, place) + len(delta.text)
    if complete:
        for delta in deltas:
            if isinstance(delta, ArgumentsDelta):
                assert isinstance(json.loads(delta.text), dict)


def written(format: ToolFormat, calls: list[tuple[str, str]]) -> str:
    objects = [f'{{"name": "{n}", "{format.arguments_key}": {a}}}' for n, a in calls]
    if format is HERMES:
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if format is LLAMA:
        return "; ".join(objects)
    if format is MISTRAL:
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@settings(deadline=None, max_examples=40)
@given(
    calls=st.lists(st.tuples(st.sampled_from(NAMES), JSON_OBJECTS), min_size=1, max_size=4),
    before=st.text(st.characters(exclude_characters="<[{"), max_size=5),
    indent=st.sampled_from([None, 2]),
    data=st.data(),
)
def test_whole_calls_are_found_as_written(
    format: ToolFormat,
    calls: list[tuple[str, dict[str, object]]],
    before: str,
    indent: int | None,
    data: st.DataObject,
) -> None:
    before = "" if format is LLAMA else before
    texts = [(name, json.dumps(value, indent=indent)) for name, value in calls]
    deltas, complete = read(format, cut(before + written(format, texts), data))
    expected: list[object] = [ContentDelta(before)] if before.strip(format.filler) else []
    for index, (name, arguments) in enumerate(texts):
        expected += [CallStarted(index, f"id{index}", name), ArgumentsDelta(index, arguments)]
    assert deltas == joined(expected)  # type: ignore[arg-type]
    assert complete
