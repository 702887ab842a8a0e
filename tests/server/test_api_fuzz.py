"""Requests that nobody thought of, made from the server's own description: never a 5xx."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.api_help import ERROR_KEYS, LONG_S, post, user
from reference.live_server import Live

from forerun.server.chat import ChatFields
from forerun.server.completions import CompletionFields
from forerun.server.info_routes import DetokenizeFields, TokenizeFields
from forerun.server.responses import ResponseFields

pytestmark = pytest.mark.slow  # minutes; `make test-slow`

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/dashboard/state"),
]


@pytest.fixture(scope="module")
def described(live: Live) -> Iterator[Any]:
    yield schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    live.check_idle()


def bound(body: Any) -> None:
    """Keep an answer short: what is tried is what is read, not how much is said."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            value = body.get(name)
            if type(value) is int and value > 4:
                body[name] = 4
        body.setdefault("max_output_tokens" if "input" in body else "max_tokens", 2)
        timeout_s = body.get("timeout_s")
        if isinstance(timeout_s, int | float) and 0 < timeout_s < 60:
            body["timeout_s"] = 60  # else a 504 is as asked


def make_sense(body: Any) -> None:
    """Give a body something to answer, so that what lies behind the first checks is reached."""
    if isinstance(body, dict):
        for name, value in (("messages", user("a")), ("prompt", "a"), ("input", "a")):
            if name in body:
                body[name] = value
        if "model" in body:
            body["model"] = "tiny"


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda each: str(each))
@pytest.mark.parametrize("mode", ["positive", "sensible", "negative"])
@pytest.mark.filterwarnings("ignore")
def test_whatever_is_sent_is_answered(
    live: Live, described: Any, method: str, path: str, mode: str
) -> None:
    if "{name}" in path and mode == "negative":
        pytest.skip("every name is a string")
    operation = described[path][method]
    generation = schemathesis.GenerationMode("negative" if mode == "negative" else "positive")

    @given(case=operation.as_strategy(generation_mode=generation))
    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:
        if mode == "sensible":
            make_sense(case.body)
        bound(case.body)
        answer = case.call(base_url=live.url, timeout=LONG_S)
        case.validate_response(answer, checks=CHECKS)
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == ERROR_KEYS

    run()


# Values that programs forget: each is tried for each field, beside an otherwise good request.
NASTY = [
    0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, 2**31, 2**63, -(2**63), 2**64 - 1, 10**30, True, False,
    "", "a", "\x00", "\ud800", "🙂", "a" * 300, "NaN", "null",
    [], [0], [-1], [2**63], [""], ["a"], ["\ud800"], [None], [[]], [{}], [[0]], list(range(200)),
    {}, {"a": 1}, {"": ""}, {"0": 1}, {"0": 100}, {"type": "text"}, {"type": "json_object"},
    {"type": "function"}, {"type": "function", "name": "f"}, {"\ud800": "\ud800"},
    {"include_usage": True}, {"enabled": False}, {"mark": True}, {"format": {"type": "text"}},
    {"regex": "a"}, {"choice": ["a"]}, {"json": {}}, {"grammar": "start: \"a\""}, {"json": True},
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "name": "f"}],
    [{"role": "user", "content": "a"}], [{"role": "user", "content": "\ud800"}],
    [{"type": "reasoning"}], [{"role": "assistant", "content": "a"}],
]  # fmt: skip
GOOD: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatFields, {"messages": user("a"), "max_tokens": 2}),
    "/v1/completions": (CompletionFields, {"prompt": "a", "max_tokens": 2}),
    "/v1/responses": (ResponseFields, {"input": "a", "max_output_tokens": 2}),
    "/tokenize": (TokenizeFields, {"prompt": "a"}),
    "/detokenize": (DetokenizeFields, {"tokens": [70]}),
}


def names_of(path: str) -> list[str]:
    """List the fields that an endpoint reads, those that it hands on too."""
    given, _ = GOOD[path]
    fields = dict(given.model_fields)
    if given is ResponseFields:
        fields |= ChatFields.model_fields
    return sorted(field.alias or name for name, field in fields.items())


@pytest.mark.parametrize("path", GOOD)
def test_no_value_of_any_field_breaks_the_server(live: Live, path: str) -> None:
    names = names_of(path)

    @given(
        fields=st.dictionaries(
            st.sampled_from(names), st.sampled_from(NASTY), min_size=1, max_size=3
        ),
        stream=st.sampled_from([None, True]),
    )
    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    def run(fields: dict[str, Any], stream: bool | None) -> None:
        body = {**GOOD[path][1], "stream": stream, **fields}
        bound(body)
        answer = post(live, path, content=json.dumps(body).encode())
        assert answer.status_code < 500, (fields, answer.text)
        assert b"internal_error" not in answer.content, (fields, answer.text)
        assert b"Infinity" not in answer.content

    run()
    live.check_idle(60)
