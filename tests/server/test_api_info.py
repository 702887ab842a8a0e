"""What the server tells of itself: models, tokens, health, version, its own description."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.api_help import LONG_S, check_error, openai_client, post, user
from reference.live_server import Live, serving
from reference.tiny import Tiny

import forerun


def get(live: Live, path: str, **more: Any) -> httpx.Response:
    return httpx.get(live.url + path, timeout=LONG_S, **more)


def test_models_are_listed_and_retrieved(live: Live) -> None:
    with openai_client(live) as client:
        models = list(client.models.list())
        assert [model.id for model in models] == ["tiny"]
        one = client.models.retrieve("tiny")
        assert one == models[0]
        assert one.object == "model"
        assert one.owned_by
        assert isinstance(one.created, int)
        with pytest.raises(openai.NotFoundError) as missing:
            client.models.retrieve("other")
    assert missing.value.code == "model_not_found"
    card = get(live, "/v1/models").json()["data"][0]
    assert set(card) >= {"id", "object", "created", "owned_by", "max_model_len", "root", "parent"}
    assert card["max_model_len"] == 512
    assert get(live, "/v1/models").json()["object"] == "list"


def test_names_with_slashes(tiny: Tiny) -> None:
    with serving(tiny.folder, server={"model_names": ("org/tiny", "alias")}) as live:
        ids = [card["id"] for card in get(live, "/v1/models").json()["data"]]
        assert ids == ["org/tiny", "alias"]
        for path in ("org/tiny", "org%2Ftiny", "alias"):
            assert get(live, f"/v1/models/{path}").status_code == 200
        with openai_client(live) as client:
            assert client.models.retrieve("org/tiny").id == "org/tiny"
        for name in ids:
            body = {"model": name, "messages": user(), "max_tokens": 1}
            assert post(live, "/v1/chat/completions", body).json()["model"] == name
        check_error(get(live, "/v1/models/org"), 404, "model")
        live.check_idle()


def test_health_ready_and_version(live: Live) -> None:
    assert get(live, "/health").status_code == 200
    ready = get(live, "/ready")
    assert ready.status_code == 200
    assert ready.json()["status"] == "ready"
    assert ready.json()["speculation"]["enabled"] is True
    assert get(live, "/version").json() == {"version": forerun.__version__}


# --- tokens -----------------------------------------------------------------------------------


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_text_comes_back_from_its_tokens(live: Live, text: str) -> None:
    told = post(live, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert post(live, "/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": text}


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenizing_both_ways(live: Live, tiny: Tiny, prefix: str) -> None:
    told = post(live, f"{prefix}/tokenize", {"model": "tiny", "prompt": "the fox 🙂"}).json()
    assert told["tokens"] == tiny.codec.encode("the fox 🙂")
    assert told["max_model_len"] == 512
    back = post(live, f"{prefix}/detokenize", {"model": "tiny", "tokens": told["tokens"]})
    assert back.json() == {"prompt": "the fox 🙂"}


def test_messages_are_tokenized_as_the_chat_sees_them(live: Live) -> None:
    told = post(live, "/tokenize", {"messages": user("a")}).json()
    text = post(live, "/detokenize", {"tokens": told["tokens"]}).json()["prompt"]
    assert text == "<|start|>user\na<|end|><|start|>assistant\n"
    bare = post(live, "/tokenize", {"messages": user("a"), "add_generation_prompt": False}).json()
    assert bare["tokens"] == told["tokens"][: bare["count"]]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert post(live, "/tokenize", {"messages": parts}).json() == told


def test_tokenizing_nothing(live: Live) -> None:
    assert post(live, "/tokenize", {"prompt": ""}).json()["tokens"] == []
    assert post(live, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": user()}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": "a"}, "messages"),
        ("/tokenize", {"messages": [{}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "alien", "content": "a"}]}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens"),
    ],
    ids=lambda each: str(each)[:50],
)
def test_tokens_that_are_none(live: Live, path: str, body: Any, param: str) -> None:
    error = check_error(post(live, path, body), 400)
    assert (error["param"] or "").startswith(param), error


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokens_of_another_model(live: Live, path: str) -> None:
    body = {"model": "other", "prompt": "a", "tokens": [1]}
    assert check_error(post(live, path, body), 404, "model")["code"] == "model_not_found"


def test_the_tokenizer_is_described(live: Live) -> None:
    told = get(live, "/tokenizer_info").json()
    assert told["eos_token"] == "<|end|>"
    assert "<|start|>" in told["chat_template"]
    assert told["model_max_length"] == 512


# --- the description ----------------------------------------------------------------------------


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    if isinstance(node, list):
        return set().union(*map(references, node))
    return set()


def test_the_description_describes_itself_whole(live: Live) -> None:
    document = get(live, "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for reference in references(document):
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part.replace("~1", "/").replace("~0", "~")]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["responses"]["200"]["description"]
            named = {each["name"] for each in operation.get("parameters", ())}
            assert all(f"{{{name}}}" not in path or name in named for name in ("name",))
            answer = httpx.request(
                method, live.url + path.replace("{name}", "tiny"), timeout=LONG_S
            )
            assert answer.status_code in ((200,) if method == "get" else (400, 415)), path


def test_the_description_knows_every_field_that_is_read(live: Live) -> None:
    schemas = get(live, "/openapi.json").json()["components"]["schemas"]
    for name in ("temperature", "speculative", "structured_outputs", "messages", "tools"):
        assert name in schemas["ChatFields"]["properties"]
    assert "json" in schemas["StructuredOutputs"]["properties"]
    assert "schema" in schemas["JsonSchemaFormat"]["properties"]
    assert schemas["Speculative"]["additionalProperties"] is False


def test_the_servers_of_two_formats_of_metrics(live: Live) -> None:
    answer = get(live, "/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    newer = get(live, "/metrics", headers={"accept": "application/openmetrics-text"})
    assert newer.status_code == 200


@pytest.mark.parametrize("since", ["nan", "inf", "x", "1e999", "", "-1", "0", "1"])
def test_the_dashboards_state(live: Live, since: str) -> None:
    answer = get(live, "/dashboard/state", params={"since": since})
    if since in ("-1", "0", "1"):
        assert answer.status_code == 200
    else:
        check_error(answer, 400, "since")
