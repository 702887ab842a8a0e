"""Prompts of the user's own: read line by line, refused line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.train.given import check_given, given_prompts, read_given


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "given.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_prompts_and_conversations_are_read(tmp_path: Path, engine) -> None:
    text = (
        '{"prompt": "the fox.", "category": "animals"}\n\n'
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},'
        ' {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}\r\n'
    )
    file = read_given(write(tmp_path, text))
    check_given(engine.codec, file)
    first, second = given_prompts(engine.codec, file, range(0, 9))
    assert (first.id, first.topic, first.source) == (0, "animals", "given")
    assert engine.codec.decode(first.token_ids, skip_special=False) == (
        "<|start|>user\nthe fox.<|end|><|start|>assistant\n"
    )
    # The target answers the user's last words, whatever was answered then.
    assert [message["content"] for message in second.messages] == ["a", "b", "c"]
    assert given_prompts(engine.codec, file, range(1, 2)) == [second]


def test_without_a_template_prompts_are_text(tmp_path: Path, plain_engine) -> None:
    file = read_given(write(tmp_path, '{"prompt": "the fox."}'))
    check_given(plain_engine.codec, file)
    [prompt] = given_prompts(plain_engine.codec, file, range(1))
    assert plain_engine.codec.decode(prompt.token_ids) == "the fox."
    assert prompt.messages == ()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("3", "either"),
        ('{"text": "a"}', "either"),
        ('{"prompt": "a", "messages": []}', "either"),
        ('{"prompt": " "}', '"prompt" is'),
        ('{"prompt": 4}', '"prompt" is 4'),
        ('{"messages": "a"}', "not a list"),
        ('{"messages": ["a"]}', "not a list"),
        ('{"messages": []}', "nobody but the assistant"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "nobody but the assistant"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] has no"),
        ('{"messages": [{"role": 1, "content": "a"}]}', r"messages\[0\] has no"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, why: str) -> None:
    path = write(tmp_path, '{"prompt": "good"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=f"given.jsonl, line 3: .*{why}"):
        read_given(path)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"messages": [{"role": "boss", "content": "a"}]}', "unknown role"),
        ('{"messages": [{"role": "user", "content": 7}]}', "neither text"),
        ('{"prompt": "half of a pair: \\ud800"}', "surrogates"),
    ],
)
def test_what_the_model_cannot_be_asked_is_refused_at_once(
    tmp_path: Path, engine, line: str, why: str
) -> None:
    file = read_given(write(tmp_path, '{"prompt": "good"}\n' + line))
    with pytest.raises(ConfigError, match=f"line 2: .*{why}"):
        check_given(engine.codec, file)


def test_a_conversation_needs_a_template(tmp_path: Path, plain_engine) -> None:
    file = read_given(write(tmp_path, '{"messages": [{"role": "user", "content": "a"}]}'))
    with pytest.raises(ConfigError, match=r"line 1: .*no chat template"):
        check_given(plain_engine.codec, file)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_given(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="is empty"):
        read_given(write(tmp_path, "\n \n"))
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "\xe4"}')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_given(path)
