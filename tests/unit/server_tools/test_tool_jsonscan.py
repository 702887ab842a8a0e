"""The scanner accepts what json.loads accepts, and says where it ends."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.server.tools.jsonscan import JsonScanner, Scan


def scan(text: str) -> tuple[bool, int]:
    """Say whether the text begins with a whole value, and how many characters that has."""
    scanner = JsonScanner()
    for index, char in enumerate(text + "\0"):
        result = scanner.feed(char)
        if result is Scan.DONE:
            return True, index + 1
        if result is Scan.DONE_BEFORE:
            return True, index
        if result is Scan.WRONG:
            return False, index
    return False, len(text)


def decode(text: str) -> tuple[bool, int]:
    """The slow twin."""
    if text[:1] not in list('{["-0123456789tfn'):
        return False, 0
    try:
        _, end = json.JSONDecoder(parse_constant=lambda name: 1 / 0).raw_decode(text)
    except (ValueError, ZeroDivisionError):
        return False, 0
    return True, end


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # json.loads refuses what is too long for an int; forty digits are enough here
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([None, 1]), st.text(max_size=3))
def test_values_end_where_they_end(
    value: object, ascii: bool, indent: int | None, rest: str
) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent) + " " + rest
    assert scan(text) == decode(text) == (True, len(text) - 1 - len(rest))


@settings(deadline=None)
@given(VALUES, st.data())
def test_damaged_values_are_judged_as_json_judges_them(value: object, data: st.DataObject) -> None:
    text = json.dumps([value])  # of a number alone, any beginning would do
    index = data.draw(st.integers(1, len(text) - 1))
    piece = data.draw(st.sampled_from([*'{}[]",:0-+.eE\\u tfn\n\x01', "", "00", "\\x", "1e", "é"]))
    text = text[:index] + piece + text[index + 1 :]
    is_value, end = scan(text)
    assert is_value == decode(text)[0]
    if is_value:
        assert end == decode(text)[1]


@pytest.mark.parametrize(
    ("text", "is_value"),
    [
        *[(text, True) for text in ("0", "-0", "10", "1.5e+3", "0E0", "true", '"\\ud83d"', "[]")],
        *[(text, False) for text in ("-", "--1", "[1.]", "[1e]", "[01]", ".5", "+1", "nul", "NaN")],
        *[(text, False) for text in ("Infinity", "-Infinity", '"\n"', '"\\x"', '"\\u12g4"')],
        *[(text, False) for text in ("[1,]", '{"a":1,}', "{1:2}", '{"a" 1}', "[1 2]", "[}", " 1")],
    ],
)
def test_by_hand(text: str, is_value: bool) -> None:
    assert scan(text)[0] is is_value is decode(text)[0]


def test_depth_is_no_recursion() -> None:
    depth = 100_000
    assert scan("[" * depth + "]" * depth) == (True, 2 * depth)
