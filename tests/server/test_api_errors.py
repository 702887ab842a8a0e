"""What is wrong is refused in the shape that OpenAI's clients read, with the field that it is."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from reference.api_help import check_error, openai_client, post, user
from reference.live_server import Live

pytestmark = pytest.mark.slow  # minutes; `make test-slow`

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PATHS = (CHAT, COMPLETIONS)
CONTEXT = 512  # of the tiny model


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {
        CHAT: {"messages": user(), "max_tokens": 2},
        COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
        RESPONSES: {"input": "hi", "max_output_tokens": 2},
    }[path]
    return {**asked, **fields}


# --- models and context --------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PATHS, RESPONSES])
@pytest.mark.parametrize("name", ["gpt-4o", "", "tiny ", "TINY", "../tiny"])
def test_unknown_models_are_404(live: Live, path: str, name: str) -> None:
    error = check_error(post(live, path, body_for(path, model=name)), 404, "model")
    assert error["code"] == "model_not_found"
    assert "tiny" in error["message"]


def test_clients_raise_what_they_should(live: Live) -> None:
    with openai_client(live) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="gpt-4o", messages=user())
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.chat.completions.create(model="tiny", messages=user(), temperature=-1)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as long:
            client.chat.completions.create(model="tiny", messages=user("x" * 3000))
        assert long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "param", "where"), [(CHAT, "messages", "messages"), (COMPLETIONS, "prompt", "prompt")]
)
def test_an_overflow_is_told_by_code_and_sentence(
    live: Live, path: str, param: str, where: str, stream: bool
) -> None:
    long = "x" * 600
    asked = body_for(path, max_tokens=7, stream=stream)
    asked |= {"messages": user(long)} if path == CHAT else {"prompt": long}
    named = {"messages": asked["messages"]} if path == CHAT else {"prompt": long}
    num = post(live, "/tokenize", named).json()["count"]
    error = check_error(post(live, path, asked), 400, param)
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(
        f"This model's maximum context length is {CONTEXT} tokens. However, you requested "
        f"{num + 7} tokens ({num} in the {where}, 7 in the completion)."
    )


@pytest.mark.parametrize("path", PATHS)
def test_max_tokens_that_do_not_fit_are_an_overflow(live: Live, path: str) -> None:
    named = {"messages": user()} if path == CHAT else {"prompt": "hi"}
    num = post(live, "/tokenize", named).json()["count"]
    fits = body_for(path, max_tokens=CONTEXT - num, stop=["e", "a", " ", "o"])
    assert post(live, path, fits).status_code == 200
    for asked in (CONTEXT - num + 1, CONTEXT, 10**9, 2**63 - 1):
        error = check_error(post(live, path, body_for(path, max_tokens=asked)), 400)
        assert error["code"] == "context_length_exceeded"
        assert f"you requested {num + asked} tokens" in error["message"]
        assert f"({num} in the" in error["message"]
        assert f"{asked} in the completion)" in error["message"]


def test_an_overflow_without_max_tokens(live: Live) -> None:
    error = check_error(post(live, CHAT, {"messages": user("x" * 3000)}), 400, "messages")
    assert error["code"] == "context_length_exceeded"
    assert "1 in the completion" in error["message"]


def test_an_overflow_of_one_of_many_prompts(live: Live) -> None:
    asked = {"prompt": ["a", "x" * 600, "b"], "max_tokens": 2}
    error = check_error(post(live, COMPLETIONS, asked), 400, "prompt")
    assert "602 tokens (600 in the prompt" in error["message"]


def test_an_overflow_of_a_response_names_its_own_field(live: Live) -> None:
    error = check_error(post(live, RESPONSES, {"input": "x" * 3000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "input"


# --- numbers -------------------------------------------------------------------------------------

NUMBERS: dict[str, list[Any]] = {
    "temperature": [-0.1, 10**400],
    "top_p": [0, -1, 1.01, 2],
    "min_p": [-0.01, 1.01],
    "typical_p": [0, -1, 1.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 1000],
    "timeout_s": [0, -1, 86401, 10**400],
}
INTEGERS: dict[str, list[Any]] = {
    "top_k": [-2, 2**64],
    "max_tokens": [0, -1, 2**64],
    "min_tokens": [-1, 3, 2**64],
    "n": [0, -1, 9, 2**70],
    "seed": [-(2**63) - 1, 2**64],
    "prompt_logprobs": [-1, 21, 2**64],
    "priority": [-(2**31) - 1, 2**31, 2**64],
}
CASES = [
    (name, value)
    for group, wrong in (
        (NUMBERS, ["1", True, False, [], {}, [1.0]]),
        (INTEGERS, ["1", 1.5, 2.0, True, False, [], {}, 10**4000]),
    )
    for name, own in group.items()
    for value in (*own, *wrong)
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda each: str(each)[:24])
def test_numbers_out_of_range_or_of_another_type(
    live: Live, path: str, name: str, value: Any
) -> None:
    error = check_error(post(live, path, body_for(path, **{name: value})), 400, name)
    assert name in error["message"]
    assert len(error["message"]) < 1000


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_what_is_no_finite_number(live: Live, path: str, name: str, value: str) -> None:
    rest = json.dumps(body_for(path)).rstrip("}")
    check_error(post(live, path, content=f'{rest}, "{name}": {value}}}'), 400)


@pytest.mark.parametrize("value", [-1, 21, 1.5, True, "1", []])
def test_top_logprobs_out_of_range(live: Live, value: Any) -> None:
    asked = body_for(CHAT, logprobs=True, top_logprobs=value)
    check_error(post(live, CHAT, asked), 400, "top_logprobs")
    check_error(post(live, COMPLETIONS, body_for(COMPLETIONS, logprobs=value)), 400, "logprobs")


def test_top_logprobs_need_logprobs(live: Live) -> None:
    check_error(post(live, CHAT, body_for(CHAT, top_logprobs=1)), 400, "top_logprobs")


# (field, value, what param must begin with)
LISTS: list[tuple[str, Any]] = [
    ("stop", [""]),
    ("stop", ["a"] * 5),
    ("stop", "x" * 257),
    ("stop", [1]),
    ("stop", 5),
    ("stop", {}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**6]),
    ("stop_token_ids", [2**70]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", "1"),
    ("stop_token_ids", [1] * 1025),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [2**70]),
    ("allowed_token_ids", ["a"]),
    ("bad_words", [""]),
    ("bad_words", "x"),
    ("bad_words", ["x"] * 129),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {" 1": 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {"999999": 1}),
    ("logit_bias", {str(2**80): 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "1"}),
    ("logit_bias", {"1": None}),
    ("logit_bias", {"1": 1, "01": 2}),
    ("logit_bias", [[1, 1]]),
    ("logit_bias", {str(each): 0 for each in range(1025)}),
    ("ignore_eos", 1),
    ("stream", "true"),
    ("stream", 1),
    ("stream_options", []),
    ("stream_options", {"include_usage": True}),
    ("user", 5),
    ("cache_salt", "x" * 257),
    ("cache_salt", 1),
    ("skip_special_tokens", "no"),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {}),
    ("response_format", "json"),
    ("structured_outputs", {}),
    ("structured_outputs", {"json": 5}),
    ("structured_outputs", {"yaml": "x"}),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "value"), LISTS, ids=lambda each: str(each)[:24])
def test_lists_and_words_that_are_wrong_name_their_field(
    live: Live, path: str, name: str, value: Any
) -> None:
    error = check_error(post(live, path, body_for(path, **{name: value})), 400)
    assert error["param"] is not None, error
    assert error["param"].startswith(name), error


def test_too_many_stops_are_told_as_too_many(live: Live) -> None:
    error = check_error(post(live, CHAT, body_for(CHAT, stop=list("abcde"))), 400, "stop")
    assert "4" in error["message"], error


@pytest.mark.parametrize(
    "prompt",
    [
        "", [], [[]], [""], ["a", ""], [[1], []], [1, "a"], ["a", 1], [[1], ["a"]], 5, {}, [True],
        [1.5], [-1], [10**6], [2**70], [[1], [10**6]], ["a"] * 65, [["a"]], [None], None,
    ],
    ids=lambda each: str(each)[:24],
)  # fmt: skip
def test_prompts_that_are_none_name_their_field(live: Live, prompt: Any) -> None:
    check_error(post(live, COMPLETIONS, {"prompt": prompt, "max_tokens": 2}), 400, "prompt")


def test_a_missing_prompt_and_missing_messages(live: Live) -> None:
    check_error(post(live, COMPLETIONS, {"max_tokens": 2}), 400, "prompt")
    check_error(post(live, CHAT, {"max_tokens": 2}), 400, "messages")
    check_error(post(live, RESPONSES, {"max_output_tokens": 2}), 400, "input")


def test_two_limits_that_contradict(live: Live) -> None:
    asked = body_for(CHAT, max_completion_tokens=3)
    check_error(post(live, CHAT, asked), 400, "max_completion_tokens")
    assert post(live, CHAT, body_for(CHAT, max_completion_tokens=2)).status_code == 200


def test_a_wrong_limit_is_named_as_it_was_sent(live: Live) -> None:
    asked = {"messages": user(), "max_completion_tokens": 0}
    error = check_error(post(live, CHAT, asked), 400)
    assert error["param"] == "max_completion_tokens"


# --- fields that are known and not obeyed --------------------------------------------------------

REFUSED: list[tuple[str, Any]] = [
    ("guided_json", {"type": "object"}),
    ("guided_regex", "a+"),
    ("guided_choice", ["a"]),
    ("guided_grammar", "root ::= x"),
    ("guided_decoding_backend", "xgrammar"),
    ("guided_whitespace_pattern", " "),
    ("guided_anything", 0),
    ("best_of", 2),
    ("suffix", "end"),
    ("chat_template", "{{ x }}"),
    ("logits_processors", ["x"]),
    ("dry_multiplier", 0.8),
    ("xtc_probability", 0.5),
    ("mirostat", 2),
    ("mirostat_tau", 5.0),
    ("use_beam_search", True),
    ("length_penalty", 2.0),
    ("functions", [{}]),
    ("function_call", "auto"),
    ("prompt_embeds", "AAAA"),
    ("regex", "a"),
    ("ebnf", "root ::= x"),
    ("grammar", "root ::= x"),
    ("json_schema", {}),
    ("include_stop_str_in_output", True),
    ("spaces_between_special_tokens", False),
    ("truncate_prompt_tokens", 5),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("stop_regex", "a"),
    ("logprob_token_ids", [1]),
    ("structural_tag", "{}"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda each: str(each)[:24])
def test_what_would_change_the_answer_is_refused_not_ignored(
    live: Live, path: str, name: str, value: Any
) -> None:
    error = check_error(post(live, path, body_for(path, **{name: value})), 400, name)
    assert error["code"] == "unsupported_parameter"
    assert name in error["message"]


@pytest.mark.parametrize("name", ["guided_json", "chat_template", "dry_multiplier", "best_of"])
def test_responses_refuse_it_too(live: Live, name: str) -> None:
    check_error(post(live, RESPONSES, body_for(RESPONSES, **{name: 2})), 400, name)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 1),
        ("use_beam_search", False),
        ("length_penalty", 1.0),
        ("length_penalty", 1),
        ("include_stop_str_in_output", False),
        ("spaces_between_special_tokens", True),
        ("modalities", ["text"]),
        ("guided_json", None),
    ],
)
def test_values_that_say_nothing_are_taken(live: Live, path: str, name: str, value: Any) -> None:
    assert post(live, path, body_for(path, **{name: value})).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_unknown_fields_are_taken_and_named(live: Live, path: str, stream: bool) -> None:
    fields = {"store": True, "service_tier": "auto", "metadata": {"a": "b"}, "zebra": None}
    answer = post(live, path, body_for(path, user="me", stream=stream, **fields))
    assert answer.status_code == 200
    named = answer.headers["x-forerun-ignored-fields"].split(", ")
    assert named == ["metadata", "service_tier", "store", "user"]


@pytest.mark.parametrize("path", PATHS)
def test_obeyed_fields_are_not_named(live: Live, path: str) -> None:
    fields = {"temperature": 0.5, "top_k": 4, "seed": 1, "stop": ["x"], "n": 2, "min_p": 0.1}
    answer = post(live, path, body_for(path, **fields))
    assert "x-forerun-ignored-fields" not in answer.headers


def test_names_of_unknown_fields_cannot_forge_headers(live: Live) -> None:
    names = ["a\r\nset-cookie: x=1", "ünicode", "with space", "x" * 5000, "", "a,b"]
    answer = post(live, CHAT, body_for(CHAT, **dict.fromkeys(names, 1)))
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    many = {f"unknown_{index}": 1 for index in range(1000)}
    answer = post(live, CHAT, body_for(CHAT, **many))
    assert answer.status_code == 200
    assert len(answer.headers["x-forerun-ignored-fields"]) < 4096
