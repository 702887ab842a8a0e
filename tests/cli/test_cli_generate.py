"""`forerun generate` with the real model: what stands on stdout, and that it is the same text."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from cli_process import Cli, command

pytestmark = pytest.mark.model

COPY = "Repeat these words three times: red green blue yellow black white."


@pytest.fixture
def ask(model: str) -> tuple[str, ...]:
    # One thread: tests run two at a time, and threads that wait for each other cost most of it.
    return ("generate", "--model", model, "--dtype", "float32", "--threads", "1")


def test_json_is_one_line_and_drafts_change_nothing(outside: Cli, ask: tuple[str, ...]) -> None:
    line = (*ask, "--prompt", COPY, "--max-tokens", "48", "--json")
    plain = outside(*line, "--drafter", "none")
    drafted = outside(*line, "--draft-tokens", "5", "--stats")
    assert plain.code == drafted.code == 0
    assert plain.stdout.count("\n") == drafted.stdout.count("\n") == 1
    assert plain.stderr == ""
    assert "tokens/s" in drafted.stderr
    assert "mean acceptance length" in drafted.stderr
    first, second = json.loads(plain.stdout), json.loads(drafted.stdout)
    assert set(first) == {"model", "text", "token_ids", "finish_reason", "seed", "stats"}
    assert first["text"] == second["text"]
    assert first["token_ids"] == second["token_ids"]
    assert first["stats"]["num_drafted"] == 0 < second["stats"]["num_drafted"]
    assert second["stats"]["num_emitted"] == len(second["token_ids"])


def test_text_alone_on_stdout(outside: Cli, ask: tuple[str, ...]) -> None:
    line = (*ask, "--raw", "--max-tokens", "8", "--temperature", "0.9", "--seed", "5")
    piped = outside(*line, "--prompt", "-", "--stream", stdin="Once upon a time\n")
    whole = outside(*line, "--prompt", "Once upon a time")
    assert piped.code == whole.code == 0
    assert piped.stdout == whole.stdout
    assert piped.stdout.endswith("\n")
    assert piped.stderr == whole.stderr == ""


def test_many_prompts_one_line_each(outside: Cli, ask: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "Say hello."}]
    lines = [{"prompt": "Say hello."}, {"messages": chat}, {"prompt": COPY}]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    ended = outside(*ask, "--prompts", str(path), "--max-tokens", "6", "--stats")
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.code == 0
    assert [result["index"] for result in results] == [0, 1, 2]
    assert results[0]["token_ids"] == results[1]["token_ids"]
    assert all(result["error"] is None for result in results)
    assert "tokens/s" in ended.stderr


def test_ctrl_c_ends_it_quietly(ask: tuple[str, ...]) -> None:
    line = (*ask, "--prompt", "Tell a story.", "--ignore-eos", "--max-tokens", "4000", "--stream")
    with subprocess.Popen(
        command(*line), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == b""


def test_a_closed_pipe_ends_it_quietly(ask: tuple[str, ...]) -> None:
    line = (*ask, "--prompt", "Tell a story.", "--ignore-eos", "--max-tokens", "4000", "--stream")
    with subprocess.Popen(
        command(*line), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""
