"""Speculation through the API: it changes nothing that is said, and its books balance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from reference.api_help import check_error, openai_client, post, stream_of, user
from reference.live_server import Live, serving
from reference.tiny import Tiny

pytestmark = pytest.mark.slow  # minutes; `make test-slow`

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PROMPT = "one two three one two three one two"
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def talkative(repeating: Tiny) -> Iterator[Live]:
    """A model that repeats itself, so that n-gram drafts are accepted."""
    from forerun.config import SpeculationConfig

    with serving(repeating.folder, speculation=SpeculationConfig(drafter="ngram")) as running:
        yield running
        running.check_idle()


@pytest.fixture(scope="module")
def routed(repeating: Tiny) -> Iterator[Live]:
    """The same with the drafter that is the default."""
    with serving(repeating.folder) as running:
        yield running
        running.check_idle()


@pytest.fixture(scope="module")
def draftless(repeating: Tiny) -> Iterator[Live]:
    from forerun.config import SpeculationConfig

    with serving(repeating.folder, speculation=SpeculationConfig(drafter="none")) as running:
        yield running
        running.check_idle()


WAYS: list[Any] = [
    {"enabled": False},
    {"enabled": True},
    {"drafter": "none"},
    {"drafter": "auto"},
    {"drafter": "ngram"},
    {"max_draft": 0},
    {"max_draft": 1},
    {"max_draft": 3},
    {"max_draft": 15},
    {"max_draft": 1024},
    {"drafter": "none", "enabled": True, "max_draft": 4},
    {"mark": True},
    {},
    None,
]
FEW = {"allowed_token_ids": [70, 71, 72, 73]}  # so few that the text soon repeats itself
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0, **FEW},
    {"temperature": 0.4, "seed": 8, **FEW},
    {"temperature": 0},
    {"temperature": 1, "seed": 11},
    {"temperature": 0.5, "seed": -4, "top_p": 0.9, "n": 2},
    {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0.8, "seed": 2, "stop": ["\n", "ee"], "min_tokens": 4},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.3, "seed": 9, "logit_bias": {"70": 3}, "ignore_eos": True},
]


def assert_same(given: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Compare choices exactly, but for the last bits of log-probabilities (torch kernels)."""
    for ours, theirs in zip(given, wanted, strict=True):
        assert {**ours, "logprobs": None} == {**theirs, "logprobs": None}
        if theirs["logprobs"] is not None:
            assert ours["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
            assert ours["logprobs"]["token_logprobs"] == pytest.approx(
                theirs["logprobs"]["token_logprobs"], abs=1e-3
            )


@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda each: "-".join(each))
def test_speculation_changes_nothing(talkative: Live, sampling: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, **sampling}
    wanted = post(talkative, COMPLETIONS, body | {"speculative": {"enabled": False}}).json()
    for way in WAYS:
        asked = body | {"speculative": way}
        assert_same(post(talkative, COMPLETIONS, asked).json()["choices"], wanted["choices"])
        events = stream_of(talkative, COMPLETIONS, asked)
        said = [events.texts()[index] for index in range(len(wanted["choices"]))]
        assert said == [choice["text"] for choice in wanted["choices"]], way


@pytest.mark.parametrize("sampling", SAMPLING[:5], ids=lambda each: "-".join(each))
def test_a_server_without_drafter_says_the_same(
    talkative: Live, draftless: Live, sampling: dict[str, Any]
) -> None:
    body = {"messages": user(PROMPT), "max_tokens": 40, **sampling}
    assert (
        post(talkative, CHAT, body).json()["choices"]
        == post(draftless, CHAT, body).json()["choices"]
    )


def test_drafts_are_accepted_at_all(talkative: Live) -> None:
    """Else this file shows little."""
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, **FEW}
    told = post(talkative, COMPLETIONS, body).json()["metrics"]["speculative_decoding"]
    assert told["num_accepted_draft_tokens"] > 10


# --- the books -----------------------------------------------------------------------------------


def check_books(body: dict[str, Any], max_draft: int) -> dict[str, Any]:
    """Check what an answer tells of its drafts against itself and its usage."""
    told = body["metrics"]["speculative_decoding"]
    histogram = told["acceptance_histogram"]
    assert type(told["num_spec_tokens"]) is int
    assert told["num_spec_tokens"] == max_draft
    assert type(histogram) is list
    assert len(histogram) == max_draft + 1
    assert all(type(count) is int and count >= 0 for count in histogram)
    assert sum(histogram) == told["num_spec_steps"] <= told["num_steps"]
    accepted = sum(count * size for size, count in enumerate(histogram))
    assert accepted == told["num_accepted_draft_tokens"] <= told["num_draft_tokens"]
    usage = body["usage"]
    completion = usage.get("completion_tokens", usage.get("output_tokens"))
    assert told["num_emitted_tokens"] == completion
    assert told["num_steps"] + accepted >= completion
    if told["num_spec_steps"]:
        mean = 1 + accepted / told["num_spec_steps"]
        assert told["mean_acceptance_length"] == pytest.approx(mean)
        rate = accepted / told["num_draft_tokens"]
        assert told["draft_acceptance_rate"] == pytest.approx(rate)
    else:
        assert told["mean_acceptance_length"] == 1
        assert told["draft_acceptance_rate"] == 0
    metrics = body["metrics"]
    for name in ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"):
        assert metrics[name] >= 0
    assert metrics["tokens_per_second"] >= 0
    if "timings" in body:
        timings = body["timings"]
        assert timings["predicted_n"] == completion
        assert timings["draft_n"] == told["num_draft_tokens"]
        assert timings["draft_n_accepted"] == accepted
        assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
        for name in ("prompt_ms", "prompt_per_second", "predicted_ms", "predicted_per_second"):
            assert timings[name] >= 0
    return told


@pytest.mark.parametrize("max_tokens", [1, 2, 40, 61])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_books_balance(talkative: Live, way: Any, max_tokens: int) -> None:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "speculative": way, **FEW}
    told = check_books(post(talkative, COMPLETIONS, body).json(), 15)
    if way is not None and (
        way.get("enabled") is False or way.get("drafter") == "none" or way.get("max_draft") == 0
    ):
        assert told["num_draft_tokens"] == told["num_spec_steps"] == 0
    if way is not None and way.get("max_draft") in (1, 3):
        assert not any(told["acceptance_histogram"][way["max_draft"] + 1 :])


@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda each: "-".join(each))
def test_the_books_balance_however_it_is_sampled(talkative: Live, sampling: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 48, **sampling, "n": 1}
    check_books(post(talkative, COMPLETIONS, body).json(), 15)
    check_books(stream_of(talkative, COMPLETIONS, body | USAGE).last, 15)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("enabled", [True, False])
def test_books_are_told_by_every_endpoint(talkative: Live, path: str, enabled: bool) -> None:
    body: dict[str, Any] = {"temperature": 0, "speculative": {"enabled": enabled}}
    body |= {
        CHAT: {"messages": user(PROMPT), "max_tokens": 30},
        COMPLETIONS: {"prompt": PROMPT, "max_tokens": 30},
        RESPONSES: {"input": PROMPT, "max_output_tokens": 30},
    }[path]
    answer = post(talkative, path, body)
    assert answer.status_code == 200, answer.text
    check_books(answer.json(), 15)


def test_books_are_told_when_there_is_no_drafter(draftless: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    answer = post(draftless, COMPLETIONS, body).json()
    told = check_books(answer, answer["metrics"]["speculative_decoding"]["num_spec_tokens"])
    assert told["num_draft_tokens"] == 0


def test_books_of_an_answer_that_a_stop_string_cut(talkative: Live) -> None:
    free = post(
        talkative, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    ).json()["choices"][0]["text"]
    stop = next(free[at : at + 2] for at in range(20, 58) if free[at : at + 2].isascii())
    answer = post(
        talkative,
        COMPLETIONS,
        {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stop": stop},
    ).json()
    check_books(answer, 15)
    assert answer["choices"][0]["text"] == free[: free.index(stop)]


def test_several_answers_tell_no_books(talkative: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "n": 2}
    assert "metrics" not in post(talkative, COMPLETIONS, body).json()


def test_nothing_generated_has_books_too(talkative: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True}
    check_books(post(talkative, COMPLETIONS, body).json(), 15)


def test_the_openai_client_hands_books_on(talkative: Live) -> None:
    with openai_client(talkative) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=user(PROMPT), max_tokens=20, temperature=0,
            extra_body={"speculative": {"max_draft": 5}},
        )  # fmt: skip
    extra = answer.model_extra
    assert extra is not None
    assert extra["metrics"]["speculative_decoding"]["num_emitted_tokens"] == 20


# --- marks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("few", [True, False])
def test_marks_say_which_tokens_were_guessed(
    talkative: Live, path: str, temperature: float, few: bool
) -> None:
    body = {"max_tokens": 60, "temperature": temperature, "seed": 4, "speculative": {"mark": True}}
    body |= FEW if few else {}
    body |= {"messages": user(PROMPT)} if path == CHAT else {"prompt": PROMPT}
    events = stream_of(talkative, path, body | USAGE | {"return_token_ids": True})
    check_books(events.last, 15)
    num_pieces = num_accepted = 0
    for chunk in events.data[:-1]:
        for choice in chunk["choices"]:
            if path == CHAT and choice["delta"].get("role"):
                assert "speculative" not in choice
                continue
            marks = choice["speculative"]
            text = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            assert "".join(marks["pieces"]) == text
            assert 0 <= marks["num_accepted"] <= len(marks["pieces"])
            assert len(marks["pieces"]) == len(choice["token_ids"])
            assert marks["drafter"] in ("ngram", "none")
            num_pieces += len(marks["pieces"])
            num_accepted += marks["num_accepted"]
    told = events.last["metrics"]["speculative_decoding"]
    assert num_pieces == events.last["usage"]["completion_tokens"]
    assert num_accepted == told["num_accepted_draft_tokens"]


def test_no_marks_without_asking(talkative: Live) -> None:
    events = stream_of(talkative, CHAT, {"messages": user(PROMPT), "max_tokens": 20})
    assert b"speculative" not in events.raw


def test_marks_with_an_echo(talkative: Live) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 20, "speculative": {"mark": True}}
    events = stream_of(talkative, COMPLETIONS, body)
    pieces = [p for c in events.data for p in c["choices"][0]["speculative"]["pieces"]]
    assert PROMPT + "".join(pieces) == events.texts()[0]


def test_marks_with_a_stop_string(talkative: Live) -> None:
    body = {
        "messages": user(PROMPT), "max_tokens": 60, "temperature": 0, "stop": ["e", "a", " "],
        "speculative": {"mark": True},
    }  # fmt: skip
    events = stream_of(talkative, CHAT, body)
    for chunk in events.data:
        choice = chunk["choices"][0]
        if "speculative" in choice:
            marks = choice["speculative"]
            assert "".join(marks["pieces"]) == choice["delta"].get("content", "")
            assert marks["num_accepted"] <= len(marks["pieces"])


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    "given",
    [
        {"unknown": 1},
        {"n_max": 4},
        {"enabled": 1},
        {"enabled": "true"},
        {"max_draft": -1},
        {"max_draft": 1025},
        {"max_draft": 1.5},
        {"max_draft": True},
        {"max_draft": "4"},
        {"drafter": 5},
        {"mark": "yes"},
        [],
        "ngram",
        True,
    ],
    ids=str,
)
def test_speculation_fields_are_strict(live: Live, path: str, given: Any) -> None:
    body: dict[str, Any] = {"speculative": given}
    body |= {CHAT: {"messages": user()}, COMPLETIONS: {"prompt": "a"}, RESPONSES: {"input": "a"}}[
        path
    ]
    error = check_error(post(live, path, body), 400)
    assert error["param"].startswith("speculative")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_unknown_drafters_are_refused_with_the_known_ones(talkative: Live, path: str) -> None:
    body: dict[str, Any] = {"speculative": {"drafter": "eagle3"}}
    body |= {CHAT: {"messages": user()}, COMPLETIONS: {"prompt": "a"}, RESPONSES: {"input": "a"}}[
        path
    ]
    error = check_error(post(talkative, path, body), 400)
    assert error["param"].startswith("speculative")
    assert "eagle3" in error["message"]
    for name in ("auto", "none", "ngram"):
        assert name in error["message"]


def test_the_default_marks_whose_guess_it_was_and_takes_no_member_by_name(routed: Live) -> None:
    """Who guesses is the router's choice for each step; a request may have it or no drafts."""
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True, **FEW}
    events = stream_of(routed, COMPLETIONS, body | USAGE | {"speculative": {"mark": True}})
    marks = [choice["speculative"] for chunk in events.data[:-1] for choice in chunk["choices"]]
    assert {mark["drafter"] for mark in marks} <= {"auto", "ngram", "suffix", "none"}
    guessers = {mark["drafter"] for mark in marks if mark["num_accepted"]}
    assert guessers
    assert guessers <= {"ngram", "suffix"}
    for name in ("auto", "none"):
        post(routed, COMPLETIONS, {**body, "stream": False, "speculative": {"drafter": name}})
    refused = {"prompt": "a", "max_tokens": 2, "speculative": {"drafter": "ngram"}}
    error = check_error(post(routed, COMPLETIONS, refused), 400)
    assert "auto, none" in error["message"]


def test_a_drafter_that_is_not_loaded_is_unknown(draftless: Live) -> None:
    body = {"prompt": "a", "max_tokens": 2, "speculative": {"drafter": "ngram"}}
    error = check_error(post(draftless, COMPLETIONS, body), 400)
    assert "none" in error["message"]
