"""How wide a body may be, told before it is parsed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from forerun.server import body
from forerun.server.failures import Refusal


def read(text: str) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": text.encode(), "more_body": False}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    return asyncio.run(body.read_json(Request(scope, receive)))


def count(value: Any) -> int:
    """The slow twin: objects and arrays of a parsed value."""
    if isinstance(value, dict):
        return 1 + sum(count(each) for each in value.values())
    return 1 + sum(count(each) for each in value) if isinstance(value, list) else 0


TEXTS = st.text(alphabet=list('[]{}"\\\n,: a'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.integers(0, 12))
def test_the_width_is_that_of_the_parsed_value(value: Any, most: int) -> None:
    text = json.dumps(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "MAX_CONTAINERS", most)
        if count(value) <= most:
            assert read(text) == value
            return
        with pytest.raises(Refusal) as refused:
            read(text)
        assert refused.value.status == 400
        assert f"{count(value)} objects and arrays; {most} are the most" in str(refused.value)


def test_brackets_in_texts_are_no_structure() -> None:
    prompt = "[{" * body.MAX_CONTAINERS + '"\\'
    assert read(json.dumps({"prompt": prompt})) == {"prompt": prompt}


@pytest.mark.parametrize("end", ["", "\\", '"', "[[", '\\"'])
def test_a_text_that_never_ends_is_no_json(end: str) -> None:
    for text in ("[" * 200_001 + '"' + "[" * 9 + end, '{"a": "' + '\\"' * 300_000 + "[" * 200_001):
        with pytest.raises(Refusal, match="no JSON"):
            read(text)
