"""Keys kept apart, limits of a key and of the server, silent logs, sizes that tell less."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from reference.live_server import Live, serving
from reference.safety_tools import (
    ALICE,
    BOB,
    KEYS,
    ask,
    chat_body,
    client_of,
    events_of,
    is_openai_error,
    post_bytes,
    wait_until,
    wire,
)
from reference.tiny import Tiny

from forerun.server.keys import ApiKey

LONG = "the quick brown fox jumps over the lazy dog and the other dogs bark at the fox. " * 3


@pytest.fixture(scope="module")
def shared(tiny: Tiny) -> Iterator[Live]:
    with serving(tiny.folder, server={"api_keys": KEYS, "public_metrics": True}) as running:
        yield running
        running.check_idle()


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


# S14


def test_a_key_finds_its_own_prefixes_and_nobody_elses(shared: Live) -> None:
    assert cached(ask(shared, LONG, ALICE)) == 0
    assert cached(ask(shared, LONG, ALICE)) > 0
    assert cached(ask(shared, LONG, BOB)) == 0
    assert cached(ask(shared, LONG, BOB)) > 0


def test_a_salt_keeps_apart_within_a_key(shared: Live) -> None:
    text = LONG + "salted"
    assert cached(ask(shared, "salted " + text, ALICE, cache_salt="one")) == 0
    assert cached(ask(shared, "salted " + text, ALICE, cache_salt="one")) > 0
    assert cached(ask(shared, "salted " + text, ALICE, cache_salt="two")) == 0
    assert cached(ask(shared, "salted " + text, ALICE)) == 0


def test_no_salt_leads_into_another_key(shared: Live) -> None:
    """What Alice's key is kept under must not be something that Bob can send."""
    text = "crossing " + LONG
    assert cached(ask(shared, text, ALICE)) == 0
    digest = KEYS[0].digest.hex()
    for salt in (f"{digest}/", digest, f"/{digest}/", "alice", "/", f"../{digest}/"):
        assert cached(ask(shared, text, BOB, cache_salt=salt)) == 0


def test_without_keys_salts_keep_apart(live: Live) -> None:
    text = "no keys " + LONG
    assert cached(ask(live, text, cache_salt="a")) == 0
    assert cached(ask(live, text, cache_salt="b")) == 0
    assert cached(ask(live, text)) == 0
    assert cached(ask(live, text, cache_salt="a")) > 0


def test_every_endpoint_keeps_keys_apart(shared: Live) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "completions " + LONG, "max_tokens": 2}),
        ("/v1/responses", {"input": "responses " + LONG, "max_output_tokens": 2}),
    ):
        counts = []
        for key in (ALICE, ALICE, BOB):
            with client_of(shared, key) as client:
                usage = client.post(path, json=body).json()["usage"]
            details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
            counts.append(details["cached_tokens"])
        assert counts[0] == counts[2] == 0 < counts[1], path


# 429


def test_a_key_at_its_limit_is_told_and_recovers(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_FAULTS", "step_slow=0.02")
    keys = (ApiKey.of(ALICE, "alice", 1), ApiKey.of(BOB, "bob"))
    with serving(tiny.folder, server={"api_keys": keys}) as live:
        body = chat_body(max_tokens=300, ignore_eos=True, stream=True)
        with client_of(live, ALICE) as client:
            with client.stream("POST", "/v1/chat/completions", json=body) as running:
                lines = running.iter_lines()
                next(lines)
                for path, other in (
                    ("/v1/chat/completions", chat_body()),
                    ("/v1/completions", {"prompt": "a"}),
                    ("/v1/responses", {"input": "a", "stream": True}),
                ):
                    with client_of(live, ALICE) as again:
                        refused = again.post(path, json=other)
                    assert refused.status_code == 429
                    assert is_openai_error(refused)
                    error = refused.json()["error"]
                    assert error["code"] == "rate_limit_exceeded"
                    assert 1 <= int(refused.headers["retry-after"]) <= 120
                assert ask(live, key=BOB).status_code == 200
            wait_until(lambda: ask(live, key=ALICE).status_code == 200, what="the place is free")
        live.check_idle()


# 503


def test_a_full_server_says_when_to_come_back(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_FAULTS", "step_slow=0.02")
    with serving(tiny.folder, server={"max_queued_requests": 1}, max_num_seqs=1) as live:
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, live, max_tokens=60, ignore_eos=True) for _ in range(8)]
            answers = [each.result() for each in asked]
        codes = [each.status_code for each in answers]
        assert codes.count(200) >= 2
        assert codes.count(503) >= 4
        for answer in answers:
            if answer.status_code == 503:
                assert is_openai_error(answer)
                assert answer.json()["error"]["type"] == "overloaded_error"
                assert int(answer.headers["retry-after"]) >= 1
        assert ask(live).status_code == 200
        live.check_idle()
        with client_of(live) as client:
            told = client.get("/metrics").text
        found = re.search(
            r'forerun_admission_rejections_total\{.*reason="queue_full".*\} (\d+)', told
        )
        assert found is not None
        assert int(found[1]) == codes.count(503)


def test_a_queue_full_of_prompt_tokens(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_FAULTS", "step_slow=0.03")
    with serving(tiny.folder, server={"max_queued_tokens": 200}, max_num_seqs=1) as live:
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(ask, live, LONG, max_tokens=50, ignore_eos=True) for _ in range(6)]
            codes = [each.result().status_code for each in asked]
        assert set(codes) == {200, 503}
        live.check_idle()


def test_official_clients_come_back_by_themselves(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    monkeypatch.setenv("FORERUN_FAULTS", "step_slow=0.01")
    with serving(tiny.folder, server={"max_queued_requests": 0}, max_num_seqs=1) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=30)

        def once(number: int) -> str | None:
            done = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": f"{number}"}], max_tokens=8
            )
            return done.choices[0].finish_reason

        with client, ThreadPoolExecutor(3) as pool:
            assert all(pool.map(once, range(4)))
        live.check_idle()


# S3, S16


def test_logs_hold_no_prompt_no_key_and_no_line_of_others(
    tiny: Tiny, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "xyzzy-private-words"
    with serving(tiny.folder, server={"api_keys": KEYS}) as live:
        for headers in (
            {"X-Request-Id": "ok"},
            {"X-Forged": f"{secret}"},
            {"User-Agent": "a\x1b[31m"},
            {"Referer": f"http://{secret}/"},
        ):
            with client_of(live, ALICE) as client:
                client.headers.update(headers)
                client.post("/v1/chat/completions", json=chat_body(secret))
                client.post("/v1/chat/completions", json=chat_body(secret, stream=True))
                client.post("/v1/chat/completions", json=chat_body(secret, temperature=99))
                client.post(
                    "/v1/chat/completions", json=chat_body(secret, model=f"{secret}\r\nINFO x")
                )
                client.post("/v1/completions", json={"prompt": secret, "n": 99})
                client.post("/v1/completions", content=f'{{"prompt": "{secret}'.encode())
                client.post("/tokenize", json={"prompt": secret})
                client.get(f"/{secret}%0d%0aINFO%20forged")
                client.get("/v1/models", headers={"Authorization": f"Bearer {secret}"})
        with wire(live) as connection:  # a client that leaves in the middle of its answer
            body = chat_body(secret, stream=True, max_tokens=300)
            connection.send(
                post_bytes("/v1/chat/completions", body, live, f"Authorization: Bearer {ALICE}")
            )
            connection.read(300)
        live.check_idle()
    said = capfd.readouterr()
    told = "\n".join(f"{each.name} {each.getMessage()}" for each in caplog.records
                     if not each.name.startswith(("httpx", "httpcore")))  # fmt: skip
    for text in (said.out, said.err, told):
        assert secret not in text
        assert ALICE not in text
        assert BOB not in text
        assert "INFO x" not in text
        assert "INFO forged" not in text


@pytest.mark.parametrize(
    "evil", ["a\nINFO forged", "a\rINFO forged", "a\x1b[2Jb", "a\x85b", "a\u2028b", "a\x00b"]
)
def test_no_text_from_outside_begins_a_line_of_the_log(evil: str) -> None:
    program = (
        "import logging, sys\n"
        "from forerun.cli.serve import _log\n"
        "_log()\n"
        "text = sys.argv[1].encode().decode('unicode_escape')\n"
        "logging.getLogger('forerun.x').warning('said %s', text)\n"
        "logging.getLogger('forerun.x').warning('next')\n"
    )
    escaped = evil.encode("unicode_escape").decode()
    done = subprocess.run(
        [sys.executable, "-c", program, escaped], capture_output=True, timeout=120, check=True
    )
    text = done.stderr.decode()
    assert "said" in text
    assert len(text.splitlines()) == 2, text
    for character in "\r\x1b\x85\u2028\x00":
        assert character not in text


def test_a_traceback_does_not_begin_lines_with_what_others_wrote() -> None:
    program = (
        "import logging\n"
        "from forerun.cli.serve import _log\n"
        "_log()\n"
        "try:\n"
        "    raise ValueError('said\\n2026-01-01 INFO forerun: forged')\n"
        "except ValueError:\n"
        "    logging.getLogger('forerun.x').exception('request failed')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=120, check=True
    )
    for line in done.stderr.decode().splitlines():
        assert not line.startswith("2026-01-01 INFO"), line


def test_keys_of_the_environment_do_not_reach_children(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that try out others' grammars have no use for them."""
    pytest.importorskip("llguidance")
    monkeypatch.setenv("FORERUN_API_KEY", "from-the-environment")
    with serving(tiny.folder) as live:
        assert ask(live, structured_outputs={"regex": "[a-z]+"}).status_code == 200
        found = 0
        for process in [each for each in Path("/proc").iterdir() if each.name.isdigit()]:
            try:
                line = (process / "cmdline").read_bytes()
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                if b"forerun.grammar.trial" not in line or parent != os.getpid():
                    continue
                found += 1
                assert b"from-the-environment" not in (process / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
        assert found


# S17


@pytest.mark.parametrize("padding", [256, 1000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_sizes_of_chunks_tell_nothing(tiny: Tiny, path: str, padding: int) -> None:
    with serving(tiny.folder, server={"stream_padding": padding}) as live:
        body = {
            "/v1/chat/completions": chat_body(LONG, max_tokens=60),
            "/v1/completions": {"prompt": LONG, "max_tokens": 60},
            "/v1/responses": {"input": LONG, "max_output_tokens": 60},
        }[path] | {"stream": True}
        if path != "/v1/responses":
            body["stream_options"] = {"include_usage": True}
        with client_of(live) as client:
            sent = client.post(path, json=body).content
    events = [each + b"\n\n" for each in sent.split(b"\n\n") if each]
    events = [each for each in events if each != b"data: [DONE]\n\n"]
    assert len(events) >= 2
    assert {len(each) % padding for each in events} == {0}
    for each in events_of(sent.decode()):
        if each != "[DONE]":
            json.loads(each)


def test_an_error_in_a_padded_stream_is_padded_too(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_FAULTS", "step_slow=0.05")
    with serving(tiny.folder, server={"stream_padding": 512}) as live:
        body = chat_body(stream=True, max_tokens=400, ignore_eos=True, timeout_s=0.5)
        with client_of(live) as client:
            sent = client.post("/v1/chat/completions", json=body).content
    *events, done, _ = sent.split(b"\n\n")
    assert done == b"data: [DONE]"
    assert b"deadline_exceeded" in events[-1]
    assert {(len(each) + 2) % 512 for each in events} == {0}


def test_a_stream_interval_hides_how_many_tokens_a_step_gave(repeating: Tiny) -> None:
    with serving(repeating.folder, server={"stream_interval": 16}) as live:
        body = {"prompt": LONG, "max_tokens": 96, "stream": True, "ignore_eos": True,
                "return_token_ids": True, "temperature": 0}  # fmt: skip
        with client_of(live) as client:
            sent = client.post("/v1/completions", json=body).text
    chunks = [json.loads(each) for each in events_of(sent) if each != "[DONE]"]
    sizes = [len(each["choices"][0]["token_ids"]) for each in chunks if each["choices"]]
    assert sum(sizes) == 96
    assert all(size >= 16 for size in sizes[:-1])


def test_time_is_not_spent_differently_by_how_wrong_a_key_is(shared: Live) -> None:
    """No statistics here: only that a wrong key costs no more than a look at all digests."""
    with client_of(shared) as client:
        began_s = time.monotonic()
        for wrong in ("x", ALICE[:-1] + "x", ALICE + "x", "y" * 8000):
            answer = client.get("/v1/models", headers={"Authorization": f"Bearer {wrong}"})
            assert answer.status_code == 401
        assert time.monotonic() - began_s < 20
