"""Answers that must look like something: they do, however they are sampled, drafted or sent."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest
from reference.api_help import check_error, openai_client, post, stream_of, user
from reference.live_server import Live

pytestmark = pytest.mark.slow  # minutes; `make test-slow`

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "dog"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_tame": {"type": "boolean"},
    },
    "required": ["kind", "size", "is_tame"],
    "additionalProperties": False,
}


def closing(live: Live) -> dict[str, Any]:
    """A bias towards the ends of strings and objects, so that a babbler comes to an end."""
    ids = post(live, "/tokenize", {"prompt": '}"'}).json()["tokens"]
    return {"logit_bias": {str(token): 12 for token in ids}}


WAYS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"structured_outputs": {"regex": "(ab|cd){2,5}-[0-9]{3}"}},
    {"structured_outputs": {"choice": ["fox", "foxes", "a dog", "привет 🙂"]}},
    {"structured_outputs": {"grammar": 'start: "<" word ">"\nword: /[a-c]{1,8}/'}},
]
SAMPLING = [
    {"temperature": 0},
    {"temperature": 1, "seed": 3},
    {"temperature": 2, "seed": -8, "top_k": 50},
    {"temperature": 0.7, "seed": 1, "repetition_penalty": 1.2, "min_p": 0.01},
]


def check_text(way: dict[str, Any], text: str) -> None:
    """Check that a whole answer is as it was asked for."""
    if "response_format" in way or "json" in way["structured_outputs"]:
        jsonschema_rs.validate(SCHEMA, json.loads(text))
        return
    given = way["structured_outputs"]
    if "regex" in given:
        assert re.fullmatch(given["regex"], text)
    elif "choice" in given:
        assert text in given["choice"]
    else:
        assert re.fullmatch("<[a-c]{1,8}>", text)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda each: "-".join(each))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way)[:44])
def test_an_answer_looks_as_asked(
    live: Live, path: str, way: dict[str, Any], sampling: dict[str, Any]
) -> None:
    body = {"max_tokens": 300, **way, **sampling}
    body |= {"messages": user()} if path == CHAT else {"prompt": "the fox"}
    told = set()
    for speculative in (None, {"enabled": False}, {"max_draft": 3}):
        answer = post(live, path, body | {"speculative": speculative})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        check_text(way, text)
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] is None
        told.add(text)
    events = stream_of(live, path, body)
    told.add(events.texts()[0])
    assert events.finish_reasons() == {0: ["stop"]}
    assert len(told) == 1


def test_samples_are_constrained_each_for_itself(live: Live) -> None:
    body = {"messages": user(), "max_tokens": 300, "n": 4, "seed": 2, "temperature": 1.5, **WAYS[0]}
    choices = post(live, CHAT, body).json()["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    for text in texts:
        check_text(WAYS[0], text)
    assert len(set(texts)) > 1


def test_requests_with_different_constraints_at_once(live: Live) -> None:
    body = {"prompt": ["a", "b", "c", "d"], "max_tokens": 300, "seed": 3, **WAYS[3]}
    for choice in post(live, COMPLETIONS, body).json()["choices"]:
        check_text(WAYS[3], choice["text"])


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_json_object(live: Live, temperature: float) -> None:
    body = {
        "messages": user(), "max_tokens": 400, "temperature": temperature, "seed": 2,
        "response_format": {"type": "json_object"}, **closing(live),
    }  # fmt: skip
    choice = post(live, CHAT, body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert stream_of(live, CHAT, body).texts()[0] == choice["message"]["content"]


def test_the_format_text_is_no_constraint(live: Live) -> None:
    body = {"messages": user(), "max_tokens": 12, "seed": 6}
    free = post(live, CHAT, body).json()["choices"][0]
    told = post(live, CHAT, body | {"response_format": {"type": "text"}}).json()["choices"][0]
    assert told == free


@pytest.mark.parametrize("stream", [True, False])
def test_what_was_cut_is_said_to_be(live: Live, stream: bool) -> None:
    body = {"messages": user(), "max_tokens": 5, "temperature": 0, **WAYS[0]}
    if stream:
        assert stream_of(live, CHAT, body).finish_reasons() == {0: ["length"]}
    else:
        assert post(live, CHAT, body).json()["choices"][0]["finish_reason"] == "length"


def test_the_same_schema_again_says_the_same(live: Live) -> None:
    body = {"messages": user(), "max_tokens": 300, "seed": 3, **WAYS[0]}
    first = post(live, CHAT, body).json()["choices"]
    assert all(post(live, CHAT, body).json()["choices"] == first for _ in range(3))


def test_the_openai_client_parses_what_it_asked_for(live: Live) -> None:
    from pydantic import BaseModel

    class Animal(BaseModel):
        name: str
        legs: int

    with openai_client(live) as client:
        answer = client.chat.completions.parse(
            model="tiny", messages=user(), response_format=Animal, max_tokens=400, seed=1,
            **closing(live),
        )  # fmt: skip
    assert isinstance(answer.choices[0].message.parsed, Animal)


def test_responses_take_a_format_too(live: Live) -> None:
    given = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    with openai_client(live) as client:
        answer = client.responses.create(
            model="tiny", input="the fox", text=given, max_output_tokens=300, temperature=0
        )
    jsonschema_rs.validate(SCHEMA, json.loads(answer.output_text))
    assert answer.status == "completed"


def test_logprobs_of_a_constrained_answer(live: Live) -> None:
    """The end of the text is a token without text: it has no bytes."""
    body = {"messages": user(), "max_tokens": 300, "seed": 3, "logprobs": True, **WAYS[4]}
    answer = post(live, CHAT, body).json()
    choice = answer["choices"][0]
    raw = b"".join(bytes(each["bytes"] or ()) for each in choice["logprobs"]["content"])
    assert raw.decode() == choice["message"]["content"]


# --- what cannot be enforced --------------------------------------------------------------------

WRONG: list[dict[str, Any]] = [
    {"structured_outputs": {"json": {"type": "nonsense"}}},
    {"structured_outputs": {"json": "not json"}},
    {"structured_outputs": {"json": {"$ref": "#/nowhere"}}},
    {"structured_outputs": {"json": {"type": "object", "properties": 5}}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"choice": [5]}},
    {"structured_outputs": {"grammar": "start: missing"}},
    {"structured_outputs": {"grammar": ")("}},
    {"structured_outputs": {"grammar": ""}},
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": "a", "json": {}}},
    {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:60])
def test_what_cannot_be_enforced_is_400(
    live: Live, path: str, stream: bool, wrong: dict[str, Any]
) -> None:
    body = {"max_tokens": 8, "stream": stream, **wrong}
    body |= {"messages": user()} if path == CHAT else {"prompt": "a"}
    check_error(post(live, path, body), 400)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:60])
def test_what_cannot_be_enforced_names_its_field(live: Live, wrong: dict[str, Any]) -> None:
    error = check_error(post(live, CHAT, {"messages": user(), "max_tokens": 8, **wrong}), 400)
    assert (error["param"] or "").partition(".")[0] in wrong, error


def test_the_server_goes_on_after_bad_constraints(live: Live) -> None:
    live.check_idle()
    body = {"messages": user(), "max_tokens": 300, "seed": 3, **WAYS[0]}
    check_text(WAYS[0], post(live, CHAT, body).json()["choices"][0]["message"]["content"])
