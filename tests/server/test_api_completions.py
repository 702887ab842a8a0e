"""Completions: prompts of all kinds, many at once, echoed and scored as evaluation harnesses do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference.api_help import openai_client, post, stream_of
from reference.live_server import Live
from reference.tiny import Tiny

PATH = "/v1/completions"
PROMPTS = ["the quick brown fox", "ab" * 9, "der Bär läuft", "你好 🙂 привет"]
SCORES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def ask(live: Live, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPTS[0], "max_tokens": 8, "seed": 5, **fields}
    answer = post(live, PATH, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(answer: dict[str, Any]) -> list[str]:
    assert [each["index"] for each in answer["choices"]] == list(range(len(answer["choices"])))
    return [each["text"] for each in answer["choices"]]


MIXES: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"n": 3},
    {"prompt": PROMPTS},
    {"prompt": PROMPTS, "n": 2, "temperature": 0.7},
    {"prompt": [[101, 102, 103], [70]]},
    {"echo": True},
    {"echo": True, "n": 2},
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 0, "prompt": PROMPTS},
    {"echo": True, "logprobs": 1, "n": 2},
    {"logprobs": 3, "n": 2},
    {"logprobs": 0},
    {"stop": ["e", " t"], "echo": True},
    {"echo": True, "max_tokens": 0},
    {"echo": True, "max_tokens": 0, "logprobs": 1},
    {"return_token_ids": True},
    {"repetition_penalty": 1.4, "frequency_penalty": 1},
]


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(mix) or "plain")
def test_a_stream_says_what_the_whole_says(live: Live, mix: dict[str, Any]) -> None:
    whole = ask(live, **mix)
    body = {"prompt": PROMPTS[0], "max_tokens": 8, "seed": 5, **mix}
    events = stream_of(live, PATH, {**body, "stream_options": {"include_usage": True}})
    assert events.is_done
    assert [events.texts()[index] for index in range(len(whole["choices"]))] == texts(whole)
    for choice in whole["choices"]:
        index = choice["index"]
        assert events.finish_reasons()[index] == [choice["finish_reason"]]
        parts = [part for each in events.data for part in each["choices"] if part["index"] == index]
        if mix.get("logprobs") is None:
            assert choice["logprobs"] is None
        else:
            for name in SCORES:
                joined = [
                    value for part in parts if part["logprobs"] for value in part["logprobs"][name]
                ]
                assert joined == choice["logprobs"][name], name
        if mix.get("return_token_ids"):
            assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events.last["usage"][name] == whole["usage"][name]
    assert events.last["choices"] == []


def test_the_shape_of_an_answer(live: Live) -> None:
    answer = ask(live)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    choice = answer["choices"][0]
    assert set(choice) >= {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert answer["usage"]["completion_tokens"] == 8


def test_the_openai_client_reads_it(live: Live) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": PROMPTS, "max_tokens": 6, "seed": 2, "n": 2, "logprobs": 1,
    }  # fmt: skip
    with openai_client(live) as client:
        whole = client.completions.create(**asked)
        said = [""] * len(whole.choices)
        for chunk in client.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                said[choice.index] += choice.text
    assert said == [choice.text for choice in whole.choices]
    assert len(said) == 8


def test_sixteen_tokens_are_the_default(live: Live) -> None:
    answer = ask(live, max_tokens=None, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16


def test_each_prompt_of_a_batch_is_answered_as_alone(live: Live) -> None:
    batch = texts(ask(live, prompt=PROMPTS, temperature=0.8))
    assert batch == [texts(ask(live, prompt=prompt, temperature=0.8))[0] for prompt in PROMPTS]


def test_samples_of_batches_are_in_the_order_of_prompts(live: Live) -> None:
    batch = texts(ask(live, prompt=PROMPTS[:2], n=3))
    alone = [text for prompt in PROMPTS[:2] for text in texts(ask(live, prompt=prompt, n=3))]
    assert batch == alone


def test_token_ids_are_as_good_as_text(live: Live, tiny: Tiny) -> None:
    for prompt in PROMPTS:
        ids = tiny.codec.encode(prompt)
        assert texts(ask(live, prompt=ids)) == texts(ask(live, prompt=prompt))
    many = [tiny.codec.encode(prompt) for prompt in PROMPTS]
    assert texts(ask(live, prompt=many)) == texts(ask(live, prompt=PROMPTS))


def test_usage_counts_prompts_once_and_samples_each(live: Live, tiny: Tiny) -> None:
    answer = ask(live, prompt=PROMPTS, n=2, ignore_eos=True)
    assert answer["usage"]["prompt_tokens"] == sum(len(tiny.codec.encode(p)) for p in PROMPTS)
    assert answer["usage"]["completion_tokens"] == 2 * len(PROMPTS) * 8


def test_an_echo_begins_with_the_prompt(live: Live) -> None:
    for prompt in PROMPTS:
        bare = texts(ask(live, prompt=prompt))[0]
        assert texts(ask(live, prompt=prompt, echo=True)) == [prompt + bare]


def test_an_echo_of_token_ids_is_their_text(live: Live, tiny: Tiny) -> None:
    ids = tiny.codec.encode(PROMPTS[2])
    assert texts(ask(live, prompt=ids, echo=True))[0].startswith(PROMPTS[2])


def test_an_echo_alone(live: Live) -> None:
    answer = ask(live, echo=True, max_tokens=0)
    assert texts(answer) == [PROMPTS[0]]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_a_stop_string_in_the_echo_stops_nothing(live: Live) -> None:
    answer = ask(live, echo=True, stop="quick", max_tokens=4)
    assert texts(answer)[0].startswith(PROMPTS[0])


def test_return_token_ids(live: Live, tiny: Tiny) -> None:
    choice = ask(live, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == tiny.codec.encode(PROMPTS[0])
    assert len(choice["token_ids"]) == 8
    detokenized = post(live, "/detokenize", {"tokens": choice["token_ids"]}).json()["prompt"]
    assert "<|end|>" in detokenized or detokenized == choice["text"]


# --- scores, as lm-eval reads them ---------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_lm_eval_scores_a_continuation(live: Live, tiny: Tiny, max_tokens: int) -> None:
    """As lm_eval/models/openai_completions.py: [ctxlen:-1] of an echo with one token more."""
    context, continuation = "the quick brown", " fox jumps"
    ids = tiny.codec.encode(context + continuation)
    ctxlen = len(tiny.codec.encode(context))
    answer = ask(
        live, prompt=[ids, ids[:9]], echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
    )
    for choice, own in zip(answer["choices"], (ids, ids[:9]), strict=True):
        scores = choice["logprobs"]
        assert len({len(scores[name]) for name in SCORES}) == 1
        assert len(scores["tokens"]) == len(own) + max_tokens
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
    end = len(ids) if max_tokens == 0 else -1
    told = answer["choices"][0]["logprobs"]["token_logprobs"][ctxlen:end]
    tops = answer["choices"][0]["logprobs"]["top_logprobs"][ctxlen:end]
    assert len(told) == len(ids) - ctxlen
    assert all(value < 0 and math.isfinite(value) for value in told)
    for token, value, top in zip(ids[ctxlen:], told, tops, strict=True):
        assert top[tiny.codec.decode([token])] == value
        assert value <= max(top.values())


def test_scores_are_the_slow_twins(live: Live, tiny: Tiny) -> None:
    for prompt in PROMPTS:
        ids = tiny.codec.encode(prompt)
        values = torch.log_softmax(tiny.model.logits(ids).double(), -1)
        wanted = [float(values[place, token]) for place, token in enumerate(ids[1:])]
        scores = ask(live, prompt=ids, echo=True, logprobs=1, max_tokens=1)["choices"][0][
            "logprobs"
        ]
        assert scores["token_logprobs"][1 : len(ids)] == pytest.approx(wanted, abs=1e-3)


def test_echoed_scores_are_prompt_logprobs(live: Live, tiny: Tiny) -> None:
    """The same figures in two shapes: OpenAI's and vLLM's."""
    for prompt in PROMPTS:
        ids = tiny.codec.encode(prompt)
        echo = ask(live, prompt=prompt, echo=True, logprobs=1, max_tokens=1)["choices"][0]
        told = ask(live, prompt=prompt, prompt_logprobs=1, max_tokens=1)["choices"][0]
        values = [
            each[str(token)]["logprob"]
            for token, each in zip(ids[1:], told["prompt_logprobs"][1:], strict=True)
        ]
        assert echo["logprobs"]["token_logprobs"][1 : len(ids)] == pytest.approx(values, abs=1e-4)


def test_a_token_counts_as_greedy_exactly_where_it_is(live: Live, tiny: Tiny) -> None:
    """lm-eval: is_greedy where the token is the likeliest key of top_logprobs.

    Half characters must not fall together under U+FFFD, or every one of them is "greedy".
    """
    for prompt in PROMPTS:
        ids = tiny.codec.encode(prompt)
        told = ask(live, prompt=prompt, prompt_logprobs=1, max_tokens=1)["choices"][0]
        ranks = [
            each[str(token)]["rank"]
            for token, each in zip(ids[1:], told["prompt_logprobs"][1:], strict=True)
        ]
        scores = ask(live, prompt=prompt, echo=True, logprobs=1, max_tokens=1)["choices"][0][
            "logprobs"
        ]
        for place, rank in enumerate(ranks, 1):
            top = scores["top_logprobs"][place]
            is_greedy = max(top, key=top.__getitem__) == scores["tokens"][place]
            assert is_greedy == (rank == 1), (prompt, place, top, rank)


def test_top_logprobs_hold_as_many_as_asked_for(live: Live) -> None:
    """Different tokens have different keys, though several may be halves of characters."""
    scores = ask(live, logprobs=5, max_tokens=12)["choices"][0]["logprobs"]
    for value, top in zip(scores["token_logprobs"], scores["top_logprobs"], strict=True):
        assert len(top) in (5, 6)
        assert value in top.values()


def test_scores_of_what_was_sampled(live: Live) -> None:
    choice = ask(live, prompt="zz", logprobs=2, logit_bias={"90": 100}, max_tokens=4)["choices"][0]
    scores = choice["logprobs"]
    assert len(set(scores["tokens"])) == 1
    assert scores["text_offset"] == [0, 1, 2, 3]
    assert all(scores["tokens"][0] in top for top in scores["top_logprobs"])


@pytest.mark.parametrize("prompt", ["the quick brown fox", "a", "def add(a, b): return a + b"])
def test_text_offsets_of_plain_text(live: Live, prompt: str) -> None:
    choice = ask(live, prompt=prompt, echo=True, logprobs=1, allowed_token_ids=list(range(64, 91)))[
        "choices"
    ][0]
    scores, text = choice["logprobs"], choice["text"]
    assert scores["text_offset"][0] == 0
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token
    assert "".join(scores["tokens"]) == text


def test_text_offsets_without_an_echo_begin_at_nought(live: Live) -> None:
    choice = ask(live, logprobs=1, allowed_token_ids=list(range(64, 91)))["choices"][0]
    scores, text = choice["logprobs"], choice["text"]
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token


def test_text_offsets_are_places_in_the_text_after_characters_of_several_tokens(
    live: Live,
) -> None:
    prompt = "ééé🙂 ab"
    choice = ask(live, prompt=prompt, echo=True, logprobs=0, max_tokens=0)["choices"][0]
    scores, text = choice["logprobs"], choice["text"]
    assert text == prompt
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        if token.isascii() and token.strip() and not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token
    assert max(scores["text_offset"]) < len(text)


def test_scores_stream_with_their_prompt_first(live: Live, tiny: Tiny) -> None:
    ids = tiny.codec.encode(PROMPTS[1])
    events = stream_of(
        live, PATH, {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 3, "seed": 1}
    )
    first = events.data[0]["choices"][0]
    assert first["text"].startswith(PROMPTS[1])
    assert len(first["logprobs"]["tokens"]) >= len(ids)


def test_a_prompt_of_one_token_can_be_scored(live: Live) -> None:
    for max_tokens in (0, 1):
        scores = ask(live, prompt=[70], echo=True, logprobs=1, max_tokens=max_tokens)["choices"][0][
            "logprobs"
        ]
        assert len(scores["tokens"]) == 1 + max_tokens
        assert scores["token_logprobs"][0] is None


def test_a_prompt_that_fills_the_context_can_be_scored(live: Live) -> None:
    limit = post(live, "/tokenize", {"prompt": "a"}).json()["max_model_len"]
    answer = ask(live, prompt=[70] * limit, echo=True, logprobs=1, max_tokens=0)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == limit


def test_scoring_again_gives_the_same_though_the_prompt_is_cached(live: Live) -> None:
    asked: dict[str, Any] = {
        "prompt": "abcdefgh " * 16, "echo": True, "logprobs": 1, "max_tokens": 1,
        "temperature": 0,
    }  # fmt: skip
    first, again = ask(live, **asked), ask(live, **asked)
    plain = ask(live, **{**asked, "echo": False, "logprobs": None})
    last = ask(live, **asked)
    for other in (again, last):
        assert other["choices"] == first["choices"]
    assert first["choices"][0]["text"].endswith(plain["choices"][0]["text"])
