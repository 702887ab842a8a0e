"""A chat's memory: the turns so far, and what each answer cost. Knows no terminal."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

from .prompt_input import Message

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.results import Chunk, GenerationResult
    from ..engine.stats import RequestStats
    from ..params import SamplingParams

__all__ = ["Conversation"]


class Conversation:
    """Turns of user and assistant, after an optional system message. Nothing is ever dropped."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._params = params
        self._first: list[Message] = (
            [] if system is None else [{"role": "system", "content": system}]
        )
        self._turns: list[Message] = []
        self.last: GenerationResult | None = None  # None: no answer yet, or it was stopped
        self.finished: list[RequestStats] = []  # of all answers that were not stopped
        self.num_stopped = 0

    def ask(self, text: str) -> Generator[Chunk, None, None]:
        """Answer a message piece by piece. What came before the iterator is closed is kept.

        Raises:
            RequestError: the conversation cannot be answered as it is; this message is taken back.
        """
        turns = [*self._turns, {"role": "user", "content": text}]
        stream = self._engine.stream([*self._first, *turns], self._params)
        self._turns = turns
        self.last = None
        parts: list[str] = []
        try:
            with closing(stream) as chunks:
                for chunk in chunks:
                    parts.append(chunk.text)
                    self.last = chunk.result
                    yield chunk
        finally:
            self._conclude("".join(parts))

    def forget(self) -> None:
        """Begin a new conversation with the same system message; the counts stay."""
        self._turns.clear()

    def _conclude(self, answer: str) -> None:
        failed = self.last is not None and self.last.error is not None
        if self.last is None:
            self.num_stopped += 1
        elif not failed:
            self.finished.append(self.last.stats)
        if answer and not failed:
            self._turns.append({"role": "assistant", "content": answer})
        else:
            self._turns.pop()  # a question without an answer would confuse the model
