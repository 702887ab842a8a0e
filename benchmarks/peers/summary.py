"""What follows from the runs: rates, their spread, ratios prompt by prompt, equal answers.

The decode rate leaves out the first delivery: (tokens - tokens in it) / (last - first second).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "Block",
    "LoadRow",
    "PromptIds",
    "Row",
    "Run",
    "Spread",
    "load_rows",
    "prompt_ratios",
    "rows",
]


@dataclass(frozen=True, slots=True)
class PromptIds:
    """A prompt as everybody gets it."""

    number: int
    group: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt answered once by one contestant."""

    contestant: str
    prompt: int
    group: str
    round_number: int  # from 1
    num_tokens: int
    num_first: int  # tokens of the first delivery
    token_ids: tuple[int, ...]  # without a final end-of-text
    ttft_s: float
    total_s: float  # to the last token
    drafted: int | None
    accepted: int | None
    steps: int | None  # passes, those without drafts included
    others_share: float = 0.0  # of a processor, taken meanwhile by whatever else runs

    @property
    def tokens_per_s(self) -> float | None:
        """The decode rate; None where everything came at once."""
        decode_s = self.total_s - self.ttft_s
        return (self.num_tokens - self.num_first) / decode_s if decode_s > 0 else None


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and how far things lie around it."""

    median: float
    low: float  # the first quartile
    high: float  # the third
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Describe values; None without any."""
        known = sorted(values)
        if not known:
            return None
        low, median, high = (
            statistics.quantiles(known, n=4, method="inclusive") if len(known) > 1 else known * 3
        )
        return cls(median, low, high, known[0], known[-1], len(known))


@dataclass(frozen=True, slots=True)
class Row:
    """A contestant over all prompts, or over those of a group."""

    contestant: str
    group: str | None
    tokens_per_s: Spread | None  # over runs
    total_tokens_per_s: float | None  # all decoded tokens / all decode seconds
    end_to_end_tokens_per_s: float  # all tokens / all seconds, prompts included
    ttft_s: Spread | None
    tokens_per_step: float | None  # where the tool tells
    draft_acceptance_rate: float | None
    ratio: Spread | None  # over prompts: this decode rate / the reference's, medians of rounds
    end_to_end_ratio: Spread | None  # over prompts: the reference's seconds / these
    num_prompts: int
    same_as_plain: int | None  # prompts with the tokens of the tool's own plain answer
    same_as_reference: int | None  # the same against the reference
    repeats_itself: int  # prompts whose answers are the same in every round

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of requests, so many at once."""

    contestant: str
    concurrency: int
    round_number: int
    num_requests: int
    num_tokens: int
    total_s: float
    steady_tokens: int  # delivered while every place was taken
    steady_s: float
    ttfts_s: tuple[float, ...]
    others_share: float = 0.0  # as in Run


@dataclass(frozen=True, slots=True)
class LoadRow:
    """A contestant at one concurrency."""

    contestant: str
    concurrency: int
    tokens_per_s: Spread  # over blocks, from the first request's start to the last token
    steady_tokens_per_s: Spread | None  # over blocks, while every place was taken
    ttft_s: Spread
    ratio: Spread | None  # over rounds: this rate / the reference's in the same round

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows(
    runs: Sequence[Run], plain_of: dict[str, str], reference: str, group: str | None = None
) -> list[Row]:
    """Sum up each contestant of `plain_of` (contestant -> its tool's plain one) that has runs."""
    chosen = [run for run in runs if group is None or run.group == group]
    by_name = {name: [run for run in chosen if run.contestant == name] for name in plain_of}
    answers = {name: _answers(each) for name, each in by_name.items()}
    return [
        _row(name, group, each, by_name.get(reference, []), plain_of, answers, reference)
        for name, each in by_name.items()
        if each
    ]


def load_rows(blocks: Sequence[Block], names: Sequence[str], reference: str) -> list[LoadRow]:
    """Sum up each contestant at each concurrency."""
    levels = sorted({block.concurrency for block in blocks})
    result = []
    for name in names:
        for level in levels:
            mine = [b for b in blocks if (b.contestant, b.concurrency) == (name, level)]
            rates = {b.round_number: b.num_tokens / b.total_s for b in mine}
            theirs = {
                b.round_number: b.num_tokens / b.total_s
                for b in blocks
                if (b.contestant, b.concurrency) == (reference, level)
            }
            spread = Spread.of(rates.values())
            ttft_s = Spread.of(seconds for block in mine for seconds in block.ttfts_s)
            if spread is None or ttft_s is None:
                continue
            steady = Spread.of(b.steady_tokens / b.steady_s for b in mine if b.steady_tokens)
            ratio = Spread.of(rates[each] / theirs[each] for each in rates if each in theirs)
            result.append(LoadRow(name, level, spread, steady, ttft_s, ratio))
    return result


def _row(
    name: str,
    group: str | None,
    runs: Sequence[Run],
    reference_runs: Sequence[Run],
    plain_of: dict[str, str],
    answers: dict[str, dict[int, set[tuple[int, ...]]]],
    reference: str,
) -> Row:
    timed = [run for run in runs if run.tokens_per_s is not None]
    decode_s = sum(run.total_s - run.ttft_s for run in timed)
    return Row(
        contestant=name,
        group=group,
        tokens_per_s=Spread.of(run.tokens_per_s for run in timed if run.tokens_per_s is not None),
        total_tokens_per_s=(
            sum(run.num_tokens - run.num_first for run in timed) / decode_s if decode_s else None
        ),
        end_to_end_tokens_per_s=sum(r.num_tokens for r in runs) / sum(r.total_s for r in runs),
        ttft_s=Spread.of(run.ttft_s for run in runs),
        tokens_per_step=_quotient(runs, "num_tokens", "steps"),
        draft_acceptance_rate=_quotient(runs, "accepted", "drafted"),
        ratio=_ratio(_rates(runs), _rates(reference_runs)),
        end_to_end_ratio=_ratio(_end_to_end(runs), _end_to_end(reference_runs)),
        num_prompts=len(answers[name]),
        same_as_plain=_num_same(answers, name, plain_of[name]),
        same_as_reference=_num_same(answers, name, reference),
        repeats_itself=sum(len(each) == 1 for each in answers[name].values()),
    )


def _rates(runs: Sequence[Run]) -> dict[int, float]:
    """Take each prompt's median decode rate."""
    known: dict[int, list[float]] = {}
    for run in runs:
        if run.tokens_per_s is not None:
            known.setdefault(run.prompt, []).append(run.tokens_per_s)
    return {prompt: statistics.median(each) for prompt, each in known.items()}


def _end_to_end(runs: Sequence[Run]) -> dict[int, float]:
    """Take each prompt's median rate, its own time included."""
    known: dict[int, list[float]] = {}
    for run in runs:
        if run.total_s > 0:
            known.setdefault(run.prompt, []).append(run.num_tokens / run.total_s)
    return {prompt: statistics.median(each) for prompt, each in known.items()}


def _ratio(rates: dict[int, float], reference: dict[int, float]) -> Spread | None:
    shared = rates.keys() & reference.keys()
    return Spread.of(rates[prompt] / reference[prompt] for prompt in shared if reference[prompt])


def _answers(runs: Sequence[Run]) -> dict[int, set[tuple[int, ...]]]:
    """Collect the different answers to each prompt."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for run in runs:
        found.setdefault(run.prompt, set()).add(run.token_ids)
    return found


def _num_same(
    answers: dict[str, dict[int, set[tuple[int, ...]]]], name: str, other: str
) -> int | None:
    """Count prompts to which both gave one answer only, and the same; None: no other runs."""
    if name == other or not answers.get(other):
        return None
    mine, theirs = answers[name], answers[other]
    return sum(len(mine[p] | theirs[p]) == 1 for p in mine.keys() & theirs.keys())


def _quotient(runs: Sequence[Run], above: str, below: str) -> float | None:
    """Divide sums over the runs in which the tool tells both."""
    pairs = [(getattr(run, above), getattr(run, below)) for run in runs]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    total = sum(b for _, b in known)
    return sum(a for a, _ in known) / total if total else None


def prompt_ratios(runs: Sequence[Run], name: str, reference: str) -> list[float]:
    """List a contestant's decode rate over the reference's, prompt by prompt."""
    mine = _rates([run for run in runs if run.contestant == name])
    theirs = _rates([run for run in runs if run.contestant == reference])
    return [mine[prompt] / theirs[prompt] for prompt in sorted(mine.keys() & theirs.keys())]
