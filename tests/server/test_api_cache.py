"""Computed prompts are shared, said to be, and kept apart by salt."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from reference.api_help import post, stream_of, user
from reference.live_server import Live

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def prompt() -> str:
    """A long prompt that nobody has sent before, not even its beginning."""
    return uuid.uuid4().hex + "the quick brown fox jumps over the lazy dog " * 4


def ask(live: Live, path: str, text: str, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        CHAT: {"messages": user(text), "max_tokens": 4},
        COMPLETIONS: {"prompt": text, "max_tokens": 4},
        RESPONSES: {"input": text, "max_output_tokens": 4},
    }[path]
    answer = post(live, path, {**body, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return details["cached_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_the_second_time_a_prompt_is_there_already(live: Live, path: str) -> None:
    text = prompt()
    first, second = ask(live, path, text), ask(live, path, text)
    num = first["usage"].get("prompt_tokens") or first["usage"]["input_tokens"]
    assert num > 64
    # A chat's first block is its template's and this prompt's: nobody had it.
    assert cached(first) == 0
    assert 64 <= cached(second) < num
    assert cached(second) % 32 == 0
    if path == CHAT:
        told = [each["choices"][0]["message"] for each in (first, second)]
    elif path == COMPLETIONS:
        told = [each["choices"][0]["text"] for each in (first, second)]
    else:
        told = [each["output"][0]["content"] for each in (first, second)]
    assert told[0] == told[1]
    if path != RESPONSES:
        assert second["timings"]["cache_n"] == cached(second)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_salts_keep_prompts_apart(live: Live, path: str) -> None:
    text = prompt()
    ask(live, path, text, cache_salt="a")
    assert cached(ask(live, path, text, cache_salt="b")) == 0
    assert cached(ask(live, path, text)) == 0
    for salt in ("a", "b"):
        assert cached(ask(live, path, text, cache_salt=salt)) >= 64
    assert cached(ask(live, path, text)) >= 64


def test_a_longer_prompt_shares_its_beginning(live: Live) -> None:
    text = prompt()
    ask(live, COMPLETIONS, text)
    assert cached(ask(live, COMPLETIONS, text + " and more")) >= 64
    assert cached(ask(live, COMPLETIONS, "x" + text)) == 0


def test_samples_count_a_prompt_once(live: Live) -> None:
    text = prompt()
    ask(live, COMPLETIONS, text)
    answer = ask(live, COMPLETIONS, text, n=3)
    assert cached(answer) <= answer["usage"]["prompt_tokens"]


def test_streams_tell_it_too(live: Live) -> None:
    text = prompt()
    body = {
        "prompt": text, "max_tokens": 2, "temperature": 0,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert cached(stream_of(live, COMPLETIONS, body).last) == 0
    assert cached(stream_of(live, COMPLETIONS, body).last) >= 64


def test_an_echo_with_scores_computes_its_prompt_anew(live: Live) -> None:
    text = prompt()
    wanted = ask(live, COMPLETIONS, text, echo=True, logprobs=1)["choices"]
    again = ask(live, COMPLETIONS, text, echo=True, logprobs=1)
    assert again["choices"] == wanted
