"""Training data: batches of prompts with the target's own answers, added to a folder on disk.

Everything about a row follows from (seed, id of the row) and the rows of batches before, so a run
that was killed goes on where it was and ends with the same rows as one that was not. (Where bits
of logits depend on the batch, see `EngineConfig.exact_bits`, a few answers may part.)
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine.engine import Engine
from ..errors import ConfigError, UnsupportedModel
from .answers import answer_prompts
from .given import GivenFile, check_given, given_prompts, read_given
from .identity import identity_of, surroundings_of
from .progress import Progress, expect
from .prompts import Earlier, Prompt, write_prompts
from .rows import ROWS_FILE, Row, append_rows, claim_folder, drop_torn_line, keep_meta, read_rows
from .screen import Seen, fault_of

__all__ = ["DataSettings", "Progress", "make_rows"]

MAX_FRUITLESS = 6  # batches in a row without a usable prompt


@dataclass(frozen=True, slots=True)
class DataSettings:
    """What the rows are; a folder holds rows of one such setting."""

    seed: int = 0
    batch: int = 256  # prompts that are tried, screened and answered together
    max_answer: int = 256  # tokens
    max_prompt: int = 120  # tokens that the model writes of one
    prompt_temperature: float = 0.8  # at 1.0 small models write much that nobody would ask
    prompt_top_p: float = 0.95
    answer_top_p: float = 0.95

    def __post_init__(self) -> None:
        for name in ("batch", "max_answer", "max_prompt"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is under 1")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} is negative; it counts from 0")


def make_rows(
    engine: Engine,
    folder: Path,
    *,
    num_tokens: int,
    model: str,
    settings: DataSettings | None = None,
    data: Path | None = None,
    max_s: float | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Add rows to a folder until their answers have `num_tokens` tokens, or time or data is out.

    `model` is what the engine was loaded from. `data` is a file of prompts; without one the model
    writes its own. Time is asked between batches. The engine should not speculate: this is a job
    for throughput.

    Raises:
        ConfigError: bad data, or a folder of another setting, or one that another run writes to.
        UnsupportedModel: the model writes nothing that could be answered.
    """
    if num_tokens < 1:
        raise ConfigError(f"{num_tokens} tokens are no training data; ask for at least 1")
    settings = settings or DataSettings()
    given = None if data is None else read_given(data)
    if given is not None:
        check_given(engine.codec, given)
    identity = identity_of(
        engine, model, dataclasses.asdict(settings), None if given is None else given.digest
    )
    with claim_folder(folder):
        keep_meta(folder, identity, surroundings_of(engine, model))
        drop_torn_line(folder)
        run = _Run(engine, folder, settings, given, num_tokens, report)
        run.go(max_s)
        end = run.progress(is_done=True)
    report(end)
    return end


@dataclass(slots=True)
class _Run:
    """One run over a folder. What it knows follows from the rows of the batches so far."""

    engine: Engine
    folder: Path
    settings: DataSettings
    given: GivenFile | None
    target_tokens: int
    report: Callable[[Progress], None]
    begin_s: float = field(default_factory=time.perf_counter)
    seen: Seen = field(default_factory=Seen)
    earlier: Earlier = field(default_factory=Earlier)
    dropped: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0  # of this run
    num_fruitless: int = 0

    def go(self, max_s: float | None) -> None:
        known = self._recall()
        self.report(self.progress())
        for ids in self._batches(known[0].id // self.settings.batch if known else 0):
            enough = self.num_tokens >= self.target_tokens
            late = max_s is not None and time.perf_counter() - self.begin_s >= max_s
            if not known and (enough or late):
                return
            self._do(ids, known)
            known = []
            self.report(self.progress())

    def _recall(self) -> list[Row]:
        """Learn from the rows there are; return those of the last batch, which may lack some."""
        if not (self.folder / ROWS_FILE).exists():
            return []
        rows = read_rows(self.folder)
        last = rows[-1].id // self.settings.batch if rows else 0
        for row in rows:
            if row.id // self.settings.batch < last:
                self._learn(row)
        return [row for row in rows if row.id // self.settings.batch == last]

    def _batches(self, first: int) -> Iterator[range]:
        size = self.settings.batch
        for number in itertools.count(first):
            if self.given is not None and number * size >= len(self.given.lines):
                return
            yield range(number * size, (number + 1) * size)

    def _do(self, ids: range, known: Sequence[Row]) -> None:
        """Bring a batch to its end, of which `known` rows are there already."""
        # All prompts are made again even so: which are kept depends on those before.
        prompts = [prompt for prompt in self._prompts(ids) if self._is_worth(prompt)]
        self._check_fruit(len(prompts), len(ids))
        there = {row.id for row in known}
        missing = [prompt for prompt in prompts if prompt.id not in there]
        rows = answer_prompts(
            self.engine,
            missing,
            seed=self.settings.seed,
            top_p=self.settings.answer_top_p,
            max_tokens=self.settings.max_answer,
        )
        append_rows(self.folder, rows)
        self.num_new_tokens += sum(len(row.answer_ids) for row in rows)
        if len(rows) < len(missing):
            self.dropped["no answer"] += len(missing) - len(rows)
        for row in (*known, *rows):
            self._learn(row)

    def _prompts(self, ids: range) -> list[Prompt]:
        if self.given is not None:
            return given_prompts(self.engine.codec, self.given, ids)
        return write_prompts(
            self.engine,
            ids,
            seed=self.settings.seed,
            earlier=self.earlier,
            temperature=self.settings.prompt_temperature,
            top_p=self.settings.prompt_top_p,
            max_tokens=self.settings.max_prompt,
        )

    def _check_fruit(self, num_prompts: int, num_tried: int) -> None:
        self.num_fruitless = 0 if num_prompts else self.num_fruitless + 1
        if self.given is None and self.num_fruitless >= MAX_FRUITLESS:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            raise UnsupportedModel(
                f"the model wrote no usable prompt in its last {MAX_FRUITLESS * num_tried} tries "
                f"(of this run's: {reasons}); give prompts of your own"
            )

    def _is_worth(self, prompt: Prompt) -> bool:
        """Say whether a prompt deserves an answer, and count why not."""
        reason = self._fault(prompt)
        if reason is None:
            self.seen.add(self._said(prompt.messages, prompt.token_ids))
            return True
        self.dropped[reason] += 1
        return False

    def _fault(self, prompt: Prompt) -> str | None:
        if len(prompt.token_ids) > self.engine.max_model_len - self.settings.max_answer:
            return "too long"
        said = self._said(prompt.messages, prompt.token_ids)
        if prompt.source == "given":  # people may say nearly the same twice
            return "known" if self.seen.knows_whole(said) else None
        return fault_of(prompt.content, len(said)) or ("known" if self.seen.knows(said) else None)

    def _said(
        self, messages: Sequence[Mapping[str, Any]], token_ids: Sequence[int]
    ) -> Sequence[int]:
        """Name the tokens by which a prompt is known: a first request's own, else the whole.

        The template's words, which are the same in all prompts, would make short ones look alike.
        """
        if len(messages) == 1 and isinstance(messages[0]["content"], str):
            return self.engine.codec.encode(messages[0]["content"], add_special=False)
        return token_ids

    def _learn(self, row: Row) -> None:
        """Take a row into the books, and into what later prompts may speak of."""
        self.num_rows += 1
        self.num_tokens += len(row.answer_ids)
        self.num_prompt_tokens += len(row.prompt_ids)
        self.seen.add(self._said(row.messages, row.prompt_ids))
        self.earlier.add(row, self.engine.codec)

    def progress(self, *, is_done: bool = False) -> Progress:
        elapsed_s = time.perf_counter() - self.begin_s
        path = self.folder / ROWS_FILE
        num_bytes = path.stat().st_size if path.exists() else 0
        rows, size = expect(self.target_tokens, self.num_tokens, self.num_rows, num_bytes)
        return Progress(
            num_rows=self.num_rows,
            num_tokens=self.num_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            num_bytes=num_bytes,
            target_tokens=self.target_tokens,
            expected_rows=rows,
            expected_bytes=size,
            dropped=dict(self.dropped),
            elapsed_s=elapsed_s,
            tokens_per_s=self.num_new_tokens / elapsed_s if self.num_new_tokens else None,
            is_done=is_done,
        )
