"""The server answers the clients that people have."""

from __future__ import annotations

import httpx
import openai
from reference.live_server import Live


def client_of(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def test_a_whole_chat_completion(live: Live) -> None:
    answer = client_of(live).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "the quick"}], max_tokens=8, seed=1
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8


def test_a_stream_says_what_the_whole_says(live: Live) -> None:
    client = client_of(live)
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the quick brown"}],
        "max_tokens": 24,
        "seed": 7,
    }
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[
        0
    ].finish_reason


def test_the_unknown_is_404_in_the_usual_shape(live: Live) -> None:
    answer = httpx.get(f"{live.url}/nothing/here")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
