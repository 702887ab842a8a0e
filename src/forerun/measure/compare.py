"""A fair comparison: each prompt plain and speculative in turn, on one engine.

tokens/s is the decode rate, (num_emitted - 1) / (e2e - ttft): the prompt's own time is left out.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .prompts import DemoPrompt

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.results import Chunk, GenerationResult
    from ..params import SamplingParams
    from .switch import SwitchedDrafter

__all__ = ["Row", "Run", "Watcher", "measure", "warm_up"]


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt answered once."""

    title: str
    speculative: bool
    round_number: int  # from 1
    result: GenerationResult

    @property
    def mode(self) -> str:
        return "speculative" if self.speculative else "plain"

    @property
    def tokens_per_s(self) -> float | None:
        """The decode rate; None for an answer of a single token, which has none."""
        tpot_s = self.result.stats.tpot_s
        return 1 / tpot_s if tpot_s > 0 else None


@dataclass(frozen=True, slots=True)
class Row:
    """All runs of one prompt, and what follows from them."""

    title: str
    runs: tuple[Run, ...]

    @property
    def plain_tokens_per_s(self) -> float | None:
        return _median_rate(run for run in self.runs if not run.speculative)

    @property
    def speculative_tokens_per_s(self) -> float | None:
        return _median_rate(run for run in self.runs if run.speculative)

    @property
    def speedup(self) -> float | None:
        """speculative / plain tokens per second, medians."""
        plain, speculative = self.plain_tokens_per_s, self.speculative_tokens_per_s
        return None if plain is None or speculative is None else speculative / plain

    @property
    def first_difference(self) -> int | None:
        """The first token, from 1, that any two runs do not share; None: all texts are the same."""
        texts = [run.result.token_ids for run in self.runs]
        for place, tokens in enumerate(itertools.zip_longest(*texts), start=1):
            if len(set(tokens)) > 1:
                return place
        return None

    @property
    def draft_acceptance_rate(self) -> float:
        return self._counted().result.stats.draft_acceptance_rate

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per pass, the target's own included."""
        return self._counted().result.stats.mean_acceptance_length

    def to_dict(self) -> dict[str, Any]:
        """List the figures under their glossary names, for JSON."""
        names = (
            "plain_tokens_per_s",
            "speculative_tokens_per_s",
            "speedup",
            "draft_acceptance_rate",
            "mean_acceptance_length",
            "first_difference",
        )
        return {
            "prompt": self.title,
            **{name: getattr(self, name) for name in names},
            "same_text": self.first_difference is None,
            "runs": [
                {
                    "mode": run.mode,
                    "round": run.round_number,
                    "tokens_per_s": run.tokens_per_s,
                    "finish_reason": run.result.finish_reason,
                    "stats": run.result.stats.to_dict(),
                }
                for run in self.runs
            ],
        }

    def _counted(self) -> Run:
        # Drafts are deterministic here: every speculative run of equal text has the same counts.
        return next(run for run in self.runs if run.speculative)


class Watcher(Protocol):
    """Whoever shows the runs while they happen."""

    def begin(self, title: str, *, speculative: bool, round_number: int) -> None:
        """A run begins."""

    def take(self, chunk: Chunk) -> None:
        """A step of it came."""

    def end(self, run: Run) -> None:
        """It is over."""

    def conclude(self, row: Row) -> None:
        """All runs of a prompt are over."""


def warm_up(
    engine: Engine, switch: SwitchedDrafter, prompt: DemoPrompt, params: SamplingParams
) -> None:
    """Answer a prompt in both modes and discard it: code is compiled, memory touched."""
    for switch.enabled in (False, True):
        engine.generate([list(prompt.messages)], params)


def measure(
    engine: Engine,
    switch: SwitchedDrafter,
    prompts: Sequence[DemoPrompt],
    params: SamplingParams,
    num_rounds: int,
    watcher: Watcher,
) -> list[Row]:
    """Run every prompt plain, speculative, plain, speculative, ...: drift hits both alike."""
    rows = []
    for prompt in prompts:
        runs = []
        for number, speculative in itertools.product(range(1, num_rounds + 1), (False, True)):
            switch.enabled = speculative
            watcher.begin(prompt.title, speculative=speculative, round_number=number)
            result = None
            for chunk in engine.stream(list(prompt.messages), params):
                watcher.take(chunk)
                result = chunk.result
            assert result is not None, "the last chunk carries the result"
            if result.error is not None:
                raise result.error
            runs.append(Run(prompt.title, speculative, number, result))
            watcher.end(runs[-1])
        rows.append(Row(prompt.title, tuple(runs)))
        watcher.conclude(rows[-1])
    return rows


def _median_rate(runs: Iterator[Run]) -> float | None:
    rates = [run.tokens_per_s for run in runs if run.tokens_per_s is not None]
    return statistics.median(rates) if rates else None
