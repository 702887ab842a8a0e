"""Answers: the target's own, many prompts at once, cut where they begin to repeat themselves.

Half of the answers are greedy, as the rest of the world measures; the others are sampled, so that
a head learns what follows the less likely tokens too.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..engine.engine import Engine
from ..engine.results import Bundle, GenerationResult
from ..errors import InvalidLogits
from ..params import SamplingParams
from ..types import TokenEvent
from .prompts import Prompt, dice_for
from .rows import Row
from .screen import is_loop

__all__ = ["TEMPERATURES", "answer_prompts", "choose_temperature"]

TEMPERATURES = (0.7, 0.8, 0.9, 1.0)  # of the half that is sampled


def choose_temperature(seed: int, row_id: int) -> float:
    """Draw how a row is answered."""
    dice = dice_for(seed, row_id, "temperature")
    return 0.0 if dice.random() < 0.5 else dice.choice(TEMPERATURES)


def answer_prompts(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    top_p: float = 0.95,
    max_tokens: int = 256,
) -> list[Row]:
    """Answer prompts in one batch, as many at once as the engine runs.

    A prompt for which the model computes no number is left out: it must not end a run of hours.
    """
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    jobs: dict[int, _Job] = {}
    for prompt in prompts:
        params = SamplingParams(
            temperature=choose_temperature(seed, prompt.id),
            top_p=top_p,
            max_tokens=max_tokens,
            seed=dice_for(seed, prompt.id, "answer").getrandbits(63),
        )
        bundle = engine.prepare(prompt.token_ids, params)
        jobs[bundle.requests[0].request_id] = _Job(prompt, params, bundle)
    try:
        for job in jobs.values():
            engine.start(job.bundle, events.put)
        num_open = len(jobs)
        while num_open:
            event = events.get()
            job = jobs[event.request_id]
            job.take(event)
            if event.error is not None and not isinstance(event.error, InvalidLogits):
                raise event.error
            num_open -= job.bundle.is_done
            if job.loop_end == len(job.token_ids) and not job.bundle.is_done:
                engine.cancel(job.bundle)
    except BaseException:
        for job in jobs.values():
            engine.cancel(job.bundle)
        raise
    return [job.row() for job in jobs.values() if not job.failed]


@dataclass(slots=True)
class _Job:
    """An answer in the making."""

    prompt: Prompt
    params: SamplingParams
    bundle: Bundle
    token_ids: list[int] = field(default_factory=list)
    loop_end: int | None = None  # where it had begun to repeat itself; what follows is not kept

    @property
    def failed(self) -> bool:
        return self._result().error is not None

    def take(self, event: TokenEvent) -> None:
        self.bundle.take(event)
        for token in event.token_ids:
            self.token_ids.append(token)
            if self.loop_end is None and is_loop(self.token_ids, len(self.token_ids)):
                self.loop_end = len(self.token_ids)

    def row(self) -> Row:
        assert self.params.seed is not None, "answer_prompts draws one"
        return Row(
            id=self.prompt.id,
            prompt_ids=self.prompt.token_ids,
            answer_ids=tuple(self.token_ids[: self.loop_end]),
            temperature=self.params.temperature,
            seed=self.params.seed,
            topic=self.prompt.topic,
            source=self.prompt.source,
            finish=str(self._result().finish_reason) if self.loop_end is None else "loop",
            messages=self.prompt.messages,
        )

    def _result(self) -> GenerationResult:
        result = self.bundle.streams[0].result
        assert result is not None, "the last event gives the result"
        return result
