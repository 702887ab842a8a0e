"""`forerun chat`: a piped session, Ctrl-C during an answer, and what the memory keeps."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from cli_process import Cli, command

from forerun.cli.conversation import Conversation
from forerun.errors import ContextTooLong
from forerun.params import SamplingParams


@dataclass
class FakeEngine:
    """Answers "yes." in two chunks, and remembers what it was asked."""

    asked: list[list[dict[str, Any]]] = field(default_factory=list)
    limit: int = 100

    def stream(self, prompt: list[dict[str, Any]], params: SamplingParams) -> Iterator[Any]:
        self.asked.append(prompt)
        if len(prompt) > self.limit:
            raise ContextTooLong("too long")
        return self._answer()

    def _answer(self) -> Iterator[Any]:
        yield SimpleNamespace(text="yes", result=None)
        yield SimpleNamespace(text=".", result=SimpleNamespace(error=None, stats="counts"))


def roles(prompt: list[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in prompt]


def converse(engine: FakeEngine, system: str | None = None) -> Conversation:
    return Conversation(engine, SamplingParams(), system)  # type: ignore[arg-type]


def test_history_grows_and_is_forgotten() -> None:
    engine = FakeEngine()
    talk = converse(engine, system="Be brief.")
    for text in ("one", "two"):
        assert "".join(chunk.text for chunk in talk.ask(text)) == "yes."
    assert roles(engine.asked[1]) == ["system", "user", "assistant", "user"]
    assert engine.asked[1][2]["content"] == "yes."
    assert len(talk.finished) == 2
    talk.forget()
    list(talk.ask("three"))
    assert roles(engine.asked[2]) == ["system", "user"]


def test_a_stopped_answer_stays_as_far_as_it_came() -> None:
    engine = FakeEngine()
    talk = converse(engine)
    chunks = talk.ask("one")
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert (talk.last, talk.num_stopped, talk.finished) == (None, 1, [])
    list(talk.ask("two"))
    assert engine.asked[1][1] == {"role": "assistant", "content": "yes"}


def test_a_message_that_does_not_fit_is_taken_back_and_nothing_else() -> None:
    engine = FakeEngine(limit=1)
    talk = converse(engine)
    list(talk.ask("one"))
    with pytest.raises(ContextTooLong):
        list(talk.ask("two"))
    engine.limit = 100
    list(talk.ask("three"))
    assert [message["content"] for message in engine.asked[-1]] == ["one", "yes.", "three"]


@pytest.mark.model
def test_a_piped_session(outside: Cli, model: str) -> None:
    lines = ["/stats", "Say hello.", "", "/stats", "/stts", "/reset", "/help", "word " * 100, "Hi."]
    ended = outside(
        "chat", "--model", model, "--max-model-len", "80", stdin="\n".join(lines) + "\n"
    )
    assert ended.code == 0
    assert ended.stdout.startswith("no whole answer yet\n")
    assert "last answer:\n" in ended.stdout
    assert "session, 1 answer:\n" in ended.stdout
    assert "tokens/s" in ended.stdout
    assert "a new conversation\n" in ended.stdout
    errors = ended.stderr.splitlines()
    assert errors[0] == "error: unknown command '/stts'; did you mean '/stats'?"
    assert errors[1].startswith("error: the prompt has 1")
    assert "/reset" in errors[1]
    assert len(ended.stdout.splitlines()[-1]) > 0  # the answer to the last line


@pytest.mark.model
def test_ctrl_c_stops_the_answer_and_not_the_program(model: str) -> None:
    line = command("chat", "--model", model, "--ignore-eos", "--max-tokens", "4000")
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for text in (b"Tell a story.\n", b"Tell another one.\n"):
            process.stdin.write(text)
            process.stdin.flush()
            assert os.read(process.stdout.fileno(), 1)
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline().startswith(b"note: stopped")
            while not os.read(process.stdout.fileno(), 4096).endswith(b"\n"):
                pass
        process.stdin.write(b"/stats\n")
        process.stdin.close()
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 0
        assert b"stopped, so not counted" in rest
        assert b"Traceback" not in process.stderr.read()
