"""Chat completions: what is asked is what is sampled, streamed or whole."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import openai
import pytest
from reference.api_help import LONG_S, openai_client, post, stream_of, user
from reference.live_server import Live

CHAT = "/v1/chat/completions"

# Every optional field that clients may send as null.
NULLABLE = [
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "ignore_eos",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "prompt_logprobs",
    "response_format",
    "structured_outputs",
    "priority",
    "cache_salt",
    "timeout_s",
    "speculative",
    "return_token_ids",
    "user",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "best_of",
    "suffix",
    "functions",
    "function_call",
    "guided_json",
    "guided_regex",
    "chat_template",
    "logits_processors",
    "model",
]


def ask(live: Live, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": user(), "max_tokens": 10, "seed": 5, **fields}
    answer = post(live, CHAT, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    return answer["choices"][index]["message"]["content"]


MIXES: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 20},
    {"min_p": 0.05, "typical_p": 0.9},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.3},
    {"temperature": 0, "frequency_penalty": 2.0},
    {"logit_bias": {"101": 4, "102": 3.5}},
    {"n": 2},
    {"n": 3, "temperature": 0.8},
    {"n": 2, "logprobs": True, "top_logprobs": 2},
    {"stop": ["a", " "], "temperature": 1.2},
    {"min_tokens": 5, "stop": "e"},
    {"ignore_eos": True, "top_k": 3},
    {"allowed_token_ids": list(range(64, 91))},
    {"bad_words": ["a", "the"]},
    {"logprobs": True},
    {"return_token_ids": True},
    {"max_tokens": 1},
    {"max_tokens": None, "max_completion_tokens": 7},
]


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(mix) or "plain")
def test_a_stream_says_what_the_whole_says(live: Live, mix: dict[str, Any]) -> None:
    whole = ask(live, **mix)
    events = stream_of(
        live,
        CHAT,
        {"model": "tiny", "messages": user(), "max_tokens": 10, "seed": 5, **mix}
        | {"stream_options": {"include_usage": True}},
    )
    assert events.is_done
    num = mix.get("n", 1)
    assert [each["index"] for each in whole["choices"]] == list(range(num))
    for index in range(num):
        choice = whole["choices"][index]
        assert events.texts()[index] == choice["message"]["content"]
        assert events.finish_reasons()[index] == [choice["finish_reason"]]
        parts = [
            each for chunk in events.data for each in chunk["choices"] if each["index"] == index
        ]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        if mix.get("logprobs"):
            told = [
                entry
                for part in parts
                if part["logprobs"] is not None
                for entry in part["logprobs"]["content"]
            ]
            assert told == choice["logprobs"]["content"]
        else:
            assert choice["logprobs"] is None
            assert all(part["logprobs"] is None for part in parts)
        if mix.get("return_token_ids"):
            ids = [token for part in parts for token in part.get("token_ids", ())]
            assert ids == choice["token_ids"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events.last["usage"][name] == whole["usage"][name]


def test_an_answer_has_every_field_that_strict_clients_want(live: Live) -> None:
    answer = ask(live)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert isinstance(answer["created"], int)
    assert answer["model"] == "tiny"
    assert isinstance(answer["system_fingerprint"], str)
    choice = answer["choices"][0]
    assert set(choice) >= {"index", "message", "finish_reason", "logprobs", "stop_reason"}
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["refusal"] is None
    assert choice["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_the_prompt_is_counted_as_the_tokenizer_counts_it(live: Live) -> None:
    messages = [{"role": "system", "content": "Bär 🙂"}, *user("你好")]
    count = post(live, "/tokenize", {"messages": messages}).json()["count"]
    assert ask(live, messages=messages)["usage"]["prompt_tokens"] == count


def test_every_optional_field_may_be_null(live: Live) -> None:
    body = {name: None for name in NULLABLE} | {"messages": user(), "max_tokens": 3, "seed": 5}
    answer = post(live, CHAT, body)
    assert answer.status_code == 200, answer.text
    assert text_of(answer.json()) == text_of(ask(live, max_tokens=3))


@pytest.mark.parametrize("name", NULLABLE)
def test_each_optional_field_may_be_null(live: Live, name: str) -> None:
    body = {"messages": user(), "max_tokens": 1, "seed": 5, name: None}
    if name == "max_tokens":
        body["max_completion_tokens"] = 1
    answer = post(live, CHAT, body)
    assert answer.status_code == 200, answer.text


def test_null_inside_stream_options_is_fine(live: Live) -> None:
    options = {"include_usage": None, "continuous_usage_stats": None}
    events = stream_of(live, CHAT, {"messages": user(), "max_tokens": 2, "stream_options": options})
    assert all("usage" not in chunk or chunk["usage"] is None for chunk in events.data)
    assert all(chunk["choices"] for chunk in events.data)


def test_null_in_messages_is_as_if_left_out(live: Live) -> None:
    bare = ask(live)
    messages = [{**user()[0], "name": None, "tool_calls": None, "tool_call_id": None}]
    assert text_of(ask(live, messages=messages)) == text_of(bare)


# --- log-probabilities ---------------------------------------------------------------------------


def test_bytes_of_tokens_join_to_the_text(live: Live) -> None:
    for seed in range(6):
        answer = ask(live, logprobs=True, top_logprobs=3, seed=seed, max_tokens=20)
        content = answer["choices"][0]["logprobs"]["content"]
        raw = b"".join(bytes(each["bytes"] or ()) for each in content)
        assert raw.decode("utf-8", "replace") == text_of(answer)
        assert len(content) == answer["usage"]["completion_tokens"]
        for each in content:
            assert each["logprob"] <= 0
            assert len(each["top_logprobs"]) == 3
            values = [top["logprob"] for top in each["top_logprobs"]]
            assert values == sorted(values, reverse=True)
            assert each["logprob"] <= values[0]
            if each["bytes"] is not None and not each["token"].startswith("bytes:"):
                assert bytes(each["bytes"]).decode() == each["token"]


def test_the_greedy_token_is_the_likeliest(live: Live) -> None:
    answer = ask(live, logprobs=True, top_logprobs=1, temperature=0)
    for each in answer["choices"][0]["logprobs"]["content"]:
        top = each["top_logprobs"][0]
        assert (each["bytes"], each["logprob"]) == (top["bytes"], top["logprob"])


@pytest.mark.parametrize("top", [None, 0])
def test_logprobs_without_top_are_the_tokens_alone(live: Live, top: int | None) -> None:
    answer = ask(live, logprobs=True, top_logprobs=top)
    assert all(each["top_logprobs"] == [] for each in answer["choices"][0]["logprobs"]["content"])


def test_logprobs_stop_with_the_text(live: Live) -> None:
    ids = post(live, "/tokenize", {"prompt": "xyz"}).json()["tokens"]
    answer = ask(live, allowed_token_ids=ids, stop="y", logprobs=True, max_tokens=40)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]


def test_prompt_logprobs_in_a_chat(live: Live) -> None:
    answer = ask(live, prompt_logprobs=2, max_tokens=1)
    told = answer["choices"][0]["prompt_logprobs"]
    assert len(told) == answer["usage"]["prompt_tokens"]
    assert told[0] is None
    for each in told[1:]:
        assert 2 <= len(each) <= 3
        assert {"logprob", "rank", "decoded_token"} == set(next(iter(each.values())))


# --- templates -----------------------------------------------------------------------------------


def test_the_last_message_can_be_continued(live: Live) -> None:
    messages = [*user(), {"role": "assistant", "content": "the lazy"}]
    answer = ask(live, messages=messages, continue_final_message=True, add_generation_prompt=False)
    rendered = "<|start|>user\nthe quick brown fox<|end|><|start|>assistant\nthe lazy"
    plain = post(live, "/v1/completions", {"prompt": rendered, "max_tokens": 10, "seed": 5}).json()
    assert text_of(answer) == plain["choices"][0]["text"]


def test_text_parts_are_joined(live: Live) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "the quick brown fox"}]}]
    assert text_of(ask(live, messages=parts)) == text_of(ask(live))


def test_a_chat_is_a_completion_of_the_rendered_messages(live: Live) -> None:
    tokens = post(live, "/tokenize", {"messages": user()}).json()["tokens"]
    plain = post(live, "/v1/completions", {"prompt": tokens, "max_tokens": 10, "seed": 5}).json()
    assert plain["choices"][0]["text"] == text_of(ask(live))


# --- clients -------------------------------------------------------------------------------------


def test_the_openai_client_accumulates_a_stream(live: Live) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": user(), "max_tokens": 12, "seed": 9, "n": 2,
    }  # fmt: skip
    with openai_client(live) as client:
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.stream(
            **asked, logprobs=True, top_logprobs=1, stream_options={"include_usage": True}
        ) as stream:
            for _ in stream:
                pass
            final = stream.current_completion_snapshot  # cut answers cannot be parsed
    for ours, theirs in zip(whole.choices, final.choices, strict=True):
        assert ours.message.content == theirs.message.content
        assert ours.finish_reason == theirs.finish_reason
    assert final.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    tokens = sum(len(each.logprobs.content) for each in final.choices)
    assert tokens == final.usage.completion_tokens


def test_many_async_clients_at_once_hear_what_each_would_alone(live: Live) -> None:
    async def gather() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=LONG_S
        ) as client:

            async def one(seed: int) -> tuple[str, str]:
                asked: dict[str, Any] = {
                    "model": "tiny", "messages": user(f"number {seed}"), "max_tokens": 8,
                    "seed": seed, "temperature": seed % 3,
                }  # fmt: skip
                whole = await client.chat.completions.create(**asked)
                said = ""
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    said += chunk.choices[0].delta.content or ""
                return whole.choices[0].message.content or "", said

            return list(await asyncio.gather(*(one(seed) for seed in range(12))))

    for whole, said in asyncio.run(gather()):
        assert whole == said
    live.check_idle()


def test_random_mixes_stream_as_they_say_whole(live: Live) -> None:
    dice = random.Random(4)
    options: dict[str, list[Any]] = {
        "temperature": [0, 0.5, 1, 1.7, None],
        "top_p": [0.5, 0.95, 1, None],
        "top_k": [-1, 1, 40, None],
        "min_p": [0, 0.02, None],
        "n": [1, 2, None],
        "presence_penalty": [0, 1, None],
        "stop": [None, "e", ["a", "\n"]],
        "logprobs": [True, False, None],
        "min_tokens": [0, 3, None],
        "max_tokens": [1, 4, 9],
        "ignore_eos": [True, False, None],
    }
    for _, seed in itertools.product(range(12), [dice.randrange(-(2**63), 2**64)]):
        mix = {name: dice.choice(values) for name, values in options.items()}
        if (mix["min_tokens"] or 0) > mix["max_tokens"]:
            mix["min_tokens"] = None
        whole = ask(live, **{**mix, "seed": seed})
        events = stream_of(live, CHAT, {"messages": user(), **mix, "seed": seed})
        for choice in whole["choices"]:
            assert events.texts()[choice["index"]] == choice["message"]["content"], mix
            assert events.finish_reasons()[choice["index"]] == [choice["finish_reason"]], mix
