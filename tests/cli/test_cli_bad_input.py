"""Bad input ends with exit code 2 and one line on stderr: what was found, and the way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_process import Cli, Ended, model_folder

ASK = ("generate", "--model", "nowhere", "--prompt", "Hello")


def assert_refused(ended: Ended, *words: str) -> None:
    assert ended.code == 2
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    for word in words:
        assert word in ended.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-tokens", "0"], ["max_tokens=0"]),
        (["--max-tokens", "-3"], ["max_tokens=-3"]),
        (["--temperature", "-0.1"], ["temperature=-0.1"]),
        (["--temperature", "nan"], ["temperature=nan"]),
        (["--temperature", "inf"], ["temperature=inf"]),
        (["--top-p", "0"], ["top_p=0"]),
        (["--top-p", "1.5"], ["top_p=1.5"]),
        (["--top-p", "nan"], ["top_p=nan"]),
        (["--min-p", "nan"], ["min_p=nan"]),
        (["--top-k", "-2"], ["top_k=-2"]),
        (["--seed", "-1"], ["seed=-1"]),
        (["--stop", ""], ["empty string"]),
        (["--stop-token-ids", "3,x"], ["'x'"]),
        (["--stop-token-ids", "-3"], ["-3"]),
        (["--dtype", "int4"], ["dtype='int4'", "float32"]),
        (["--draft-tokens", "65"], ["max_draft=65", "0..64"]),
        (["--threads", "0"], ["num_threads=0"]),
        (["--max-model-len", "0"], ["max_model_len=0"]),
        (["--speculative-config", "{"], ["not JSON"]),
        (["--speculative-config", "[1]"], ["JSON object"]),
        (["--speculative-config", '{"num_speculativ_tokens": 3}'], ["num_speculative_tokens"]),
        (
            ["--drafter", "ngram", "--speculative-config", '{"method": "ngram"}'],
            ["--drafter", "'method'"],
        ),
        (["--raw", "--system", "Be brief."], ["--system", "--raw"]),
        (["--json", "--stream"], ["--stream", "--json"]),
        (["--prompt-file", "x"], ["--prompt and --prompt-file exclude"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_options_outside_their_range(inside: Cli, options: list[str], words: list[str]) -> None:
    assert_refused(inside(*ASK, *options), *words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["generate", "--temprature", "1"], ["--temprature", "did you mean --temperature?"]),
        (["chat", "--modle", "x"], ["did you mean --model?"]),
        (["demo", "--qqq"], ["unknown option --qqq", "forerun demo --help"]),
        (["genrate"], ["'genrate'", "did you mean generate?"]),
        (["generate", "--prompt", "x"], ["missing option '--model'"]),
        (["generate", "--model", "x", "--prompt", "y", "--seed", "soon"], ["--seed"]),
        (["generate", "--model"], ["--model"]),
        (["generate", "--model", "x"], ["no prompt", "--prompt-file"]),
        (["generate", "--model", "x", "--prompt", ""], ["the prompt is empty"]),
        (["generate", "--model", "x", "--prompt-file", "no/such"], ["no/such cannot be read"]),
        (["demo", "--rounds", "0"], ["rounds=0"]),
        (["pull", "smollm2-153m"], ["did you mean 'smollm2-135m'?"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_command_lines_that_do_not_work(inside: Cli, line: list[str], words: list[str]) -> None:
    assert_refused(inside(*line), *words)


def test_unknown_model(inside: Cli, no_models: Path) -> None:
    assert_refused(inside(*ASK), "no model 'nowhere'")
    near = inside("chat", "--model", "smollm2-135")
    assert_refused(near, "did you mean 'smollm2-135m'?")


def test_known_model_that_was_not_pulled(inside: Cli, no_models: Path) -> None:
    ended = inside("generate", "--model", "smollm2-135m", "--prompt", "x")
    assert_refused(ended, "forerun pull smollm2-135m")


def test_a_message_never_takes_two_lines(inside: Cli, no_models: Path) -> None:
    assert_refused(inside("generate", "--model", "two\nlines\x1b[31m", "--prompt", "x"))


def test_files_that_are_no_prompts(inside: Cli, tmp_path: Path) -> None:
    def ask(option: str, data: bytes) -> Ended:
        path = tmp_path / "file"
        path.write_bytes(data)
        return inside("generate", "--model", "nowhere", option, str(path))

    assert_refused(ask("--prompt-file", b"\n"), "empty")
    assert_refused(ask("--prompt-file", b"ab\xff"), "byte 2 is 0xff")
    assert_refused(ask("--prompts", b"\n\n"), "no prompts")
    good = json.dumps({"prompt": "x"}).encode()
    for bad, word in (
        (b"{", "is not JSON"),
        (b'"x"', "not an object"),
        (b'{"promt": "x"}', "did you mean 'prompt'?"),
        (b'{"prompt": 3}', "not text"),
        (b'{"prompt": ""}', "empty"),
        (b"{}", "either prompt or messages"),
        (b'{"messages": "x"}', "not a list"),
    ):
        assert_refused(ask("--prompts", good + b"\n" + bad + b"\n"), "file:2", word)


def test_a_surprise_is_one_line_too(inside: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("forerun.registry.list_models", break_down)
    ended = inside("pull")
    assert ended.code == 1
    assert ended.stderr == (
        "error: unexpected RuntimeError: out of luck; run with FORERUN_DEBUG=1 for the traceback\n"
    )
    monkeypatch.setenv("FORERUN_DEBUG", "1")
    assert "Traceback" in inside("pull").stderr


@pytest.mark.model
def test_what_only_the_model_can_refuse(inside: Cli, model: str) -> None:
    ask = ("generate", "--model", model, "--threads", "1", "--max-model-len", "64")
    assert_refused(inside(*ask, "--prompt", "word " * 100), "131 tokens", "64", "max_model_len")
    outside_vocabulary = inside(*ask, "--prompt", "x", "--stop-token-ids", "49152")
    assert_refused(outside_vocabulary, "49152", "49151")


@pytest.mark.model
def test_a_folder_without_tokenizer(inside: Cli, model: str, tmp_path: Path) -> None:
    for path in model_folder().iterdir():
        if not path.name.startswith("tokenizer"):
            (tmp_path / path.name).symlink_to(path)
    ended = inside("generate", "--model", str(tmp_path), "--prompt", "x")
    assert_refused(ended, "tokenizer")
