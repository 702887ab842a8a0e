"""Options of sampling and of stopping do what they say."""

from __future__ import annotations

from typing import Any

import pytest
from reference.api_help import post, stream_of, user
from reference.live_server import Live

pytestmark = pytest.mark.slow  # minutes; `make test-slow`

CHAT = "/v1/chat/completions"


def ask(live: Live, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": user(), "max_tokens": 10, "seed": 5, **fields}
    answer = post(live, CHAT, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    return answer["choices"][index]["message"]["content"]


# --- sampling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63, 2**64 - 1])
def test_a_seed_gives_the_same_answer_again(live: Live, seed: int) -> None:
    assert text_of(ask(live, seed=seed)) == text_of(ask(live, seed=seed))


def test_seeds_differ(live: Live) -> None:
    texts = {text_of(ask(live, seed=seed)) for seed in (1, 2, 3, -1, -2)}
    assert len(texts) == 5


def test_without_a_seed_answers_differ(live: Live) -> None:
    assert len({text_of(ask(live, seed=None)) for _ in range(4)}) > 1


def test_samples_differ_and_come_again(live: Live) -> None:
    first = ask(live, n=4)
    again = ask(live, n=4)
    texts = [text_of(first, index) for index in range(4)]
    assert len(set(texts)) == 4
    assert texts == [text_of(again, index) for index in range(4)]
    assert texts[0] == text_of(ask(live))
    assert first["usage"]["completion_tokens"] == sum(
        len(each["token_ids"]) for each in ask(live, n=4, return_token_ids=True)["choices"]
    )


def test_greedy_samples_are_all_the_same(live: Live) -> None:
    answer = ask(live, n=3, temperature=0, seed=None)
    assert len({text_of(answer, index) for index in range(3)}) == 1


@pytest.mark.parametrize("top_k", [-1, 0, 10**6])
def test_top_k_that_keeps_all_changes_nothing(live: Live, top_k: int) -> None:
    assert text_of(ask(live, top_k=top_k)) == text_of(ask(live))


def test_top_k_of_one_is_greedy(live: Live) -> None:
    assert text_of(ask(live, top_k=1)) == text_of(ask(live, temperature=0))


def test_allowed_tokens_alone_are_said(live: Live) -> None:
    ids = post(live, "/tokenize", {"prompt": "xyz"}).json()["tokens"]
    answer = ask(live, allowed_token_ids=ids, max_tokens=12)
    assert set(text_of(answer)) <= set("xyz")
    assert len(text_of(answer)) == 12


def test_logit_bias_has_string_keys_and_decides(live: Live) -> None:
    (token,) = post(live, "/tokenize", {"prompt": "z"}).json()["tokens"]
    answer = ask(live, logit_bias={str(token): 100}, max_tokens=5)
    assert text_of(answer) == "zzzzz"
    free = ask(live, logit_bias={str(token): -100}, temperature=2, max_tokens=20)
    assert "z" not in text_of(free)


def test_bad_words_are_never_completed(live: Live) -> None:
    ids = post(live, "/tokenize", {"prompt": "xyz"}).json()["tokens"]
    answer = ask(live, allowed_token_ids=ids, bad_words=["xy", "zz"], max_tokens=40)
    assert "xy" not in text_of(answer)
    assert "zz" not in text_of(answer)
    assert len(text_of(answer)) == 40


def test_penalties_change_what_is_said(live: Live) -> None:
    ids = post(live, "/tokenize", {"prompt": "abcdefgh"}).json()["tokens"]
    # A bias makes one letter win; a penalty each time makes others win too.
    asked = {"logit_bias": {str(each): 30 for each in ids[:1]}, "temperature": 0}
    assert len(set(text_of(ask(live, **asked)))) == 1
    assert len(set(text_of(ask(live, **asked, presence_penalty=2, repetition_penalty=100)))) > 1


def test_stop_ends_the_text_before_the_string(live: Live) -> None:
    ids = post(live, "/tokenize", {"prompt": "xyz"}).json()["tokens"]
    free = text_of(ask(live, allowed_token_ids=ids, max_tokens=40))
    for stop in ("xy", "yzz", "zx", free[5:9]):
        answer = ask(live, allowed_token_ids=ids, max_tokens=40, stop=stop)
        choice = answer["choices"][0]
        if stop in free:
            assert text_of(answer) == free[: free.index(stop)]
            assert choice["finish_reason"] == "stop"
            assert choice["stop_reason"] == stop
            # Tokens are counted up to the one that completed the string.
            assert answer["usage"]["completion_tokens"] == free.index(stop) + len(stop)
        else:
            assert text_of(answer) == free
            assert choice["finish_reason"] == "length"
            assert choice["stop_reason"] is None


def test_the_first_of_several_stops_counts(live: Live) -> None:
    ids = post(live, "/tokenize", {"prompt": "xyz"}).json()["tokens"]
    free = text_of(ask(live, allowed_token_ids=ids, max_tokens=40))
    stops = [free[9:12], free[4:7], "never"]
    expected = min(stops[:2], key=free.index)
    choice = ask(live, allowed_token_ids=ids, max_tokens=40, stop=stops)["choices"][0]
    assert choice["message"]["content"] == free[: free.index(expected)]
    assert choice["stop_reason"] == expected


def test_a_stop_string_is_found_in_a_stream_and_never_shown(live: Live) -> None:
    ids = post(live, "/tokenize", {"prompt": "xyz"}).json()["tokens"]
    asked = {"messages": user(), "seed": 5, "allowed_token_ids": ids, "max_tokens": 40}
    free = text_of(ask(live, allowed_token_ids=ids, max_tokens=40))
    for length in (1, 2, 3, 5):
        stop = free[10 : 10 + length]
        events = stream_of(live, CHAT, {**asked, "stop": [stop]})
        assert events.texts()[0] == free[: free.index(stop)]


def test_a_stop_token_ends_without_being_shown(live: Live) -> None:
    ids = post(live, "/tokenize", {"prompt": "xyz"}).json()["tokens"]
    free = text_of(ask(live, allowed_token_ids=ids, max_tokens=40))
    answer = ask(live, allowed_token_ids=ids, max_tokens=40, stop_token_ids=[ids[1]])
    choice = answer["choices"][0]
    assert choice["message"]["content"] == free[: free.index("y")]
    assert choice["stop_reason"] == ids[1]
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == free.index("y") + 1


def test_the_models_own_end_is_stop_without_reason_and_can_be_ignored(live: Live) -> None:
    (end,) = post(live, "/tokenize", {"prompt": "<|end|>"}).json()["tokens"]
    bias = {"logit_bias": {str(end): 100}}
    answer = ask(live, **bias)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 1
    on = ask(live, **bias, ignore_eos=True, max_tokens=6)
    assert on["choices"][0]["finish_reason"] == "length"
    assert on["usage"]["completion_tokens"] == 6
    later = ask(live, **bias, min_tokens=4)
    assert later["usage"]["completion_tokens"] == 5
    assert later["choices"][0]["finish_reason"] == "stop"


def test_min_tokens_holds_off_stop_strings(live: Live) -> None:
    ids = post(live, "/tokenize", {"prompt": "xyz"}).json()["tokens"]
    answer = ask(live, allowed_token_ids=ids, stop=["x", "y", "z"], min_tokens=6, max_tokens=30)
    assert answer["usage"]["completion_tokens"] >= 6
