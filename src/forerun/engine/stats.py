"""What happened, as counters; every rate is a property with its formula (docs/glossary.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Counters", "RequestStats", "SampledRow", "StepReport", "add_counts"]


@dataclass(slots=True)
class Counters:
    """Running counts of a request or an engine. Seconds are those of the whole steps it was in."""

    num_steps: int = 0  # verify passes, those without a draft included
    num_drafts: int = 0  # steps in which at least one token was drafted
    num_drafted: int = 0
    num_accepted: int = 0  # draft tokens that reached the output; never the target's own token
    num_emitted: int = 0  # accepted tokens and the target's own
    offered_by_position: list[int] = field(default_factory=list)  # steps that drafted position i
    accepted_by_position: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    drafter_faults: dict[str, int] = field(default_factory=dict)  # by reason

    def count_step(
        self, num_drafted: int, num_accepted: int, num_emitted: int, draft_depth: int
    ) -> None:
        """Count one verify pass, after stops cut its block; `draft_depth` is its longest path."""
        self.num_steps += 1
        self.num_drafts += num_drafted > 0
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_emitted += num_emitted
        _count_up_to(self.offered_by_position, draft_depth)
        _count_up_to(self.accepted_by_position, num_accepted)

    def count_time(self, draft_s: float, verify_s: float, host_s: float) -> None:
        """Count the seconds of a step."""
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.host_s += host_s

    def count_fault(self, reason: str) -> None:
        """Count a drafter's failure."""
        self.drafter_faults[reason] = self.drafter_faults.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The counts of a request, complete when it ended, and what follows from them."""

    num_prompt_tokens: int
    num_steps: int
    num_drafts: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    offered_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    num_cached_tokens: int
    num_preemptions: int
    drafter_faults: Mapping[str, int]
    queue_s: float  # arrival to first scheduled
    ttft_s: float  # arrival to first token
    e2e_s: float  # arrival to last token
    draft_s: float
    verify_s: float
    host_s: float

    @property
    def tpot_s(self) -> float:
        """(e2e - ttft) / (num_emitted - 1): seconds per output token after the first."""
        return (self.e2e_s - self.ttft_s) / max(1, self.num_emitted - 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """num_accepted / num_drafted: no target tokens counted; falls as drafts get longer."""
        return self.num_accepted / max(1, self.num_drafted)

    @property
    def mean_acceptance_length(self) -> float:
        """num_emitted / num_steps: tokens per pass, the target's own included."""
        return self.num_emitted / max(1, self.num_steps)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Of the steps that drafted position i, the part in which it was accepted."""
        accepted = [*self.accepted_by_position, *[0] * len(self.offered_by_position)]
        return tuple(a / o for a, o in zip(accepted, self.offered_by_position, strict=False))

    def to_dict(self) -> dict[str, Any]:
        """List counts and rates under their glossary names, for JSON."""
        derived = (
            "tpot_s",
            "draft_acceptance_rate",
            "mean_acceptance_length",
            "acceptance_by_position",
        )
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True, slots=True)
class SampledRow:
    """What a step meant for one request that had caught up."""

    method: str  # which drafter was asked; "none" where nobody was
    num_drafted: int
    num_accepted: int
    num_emitted: int
    idle_reason: str | None  # why nothing was drafted; None: something was
    draft_depth: int | None = None  # of a tree's longest path; None: the draft was one path

    @property
    def num_positions(self) -> int:
        """The positions that the draft reached: its tokens, but for trees."""
        return self.num_drafted if self.draft_depth is None else self.draft_depth


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step as whoever watches the engine hears of it, after it is done."""

    num_requests: int  # that took part in the pass
    num_rows: int  # tokens computed: prompt pieces, decoded tokens and drafts
    num_prompt_tokens: int  # of these, tokens of prompts
    sampled: tuple[SampledRow, ...]  # the requests that had caught up
    draft_s: float
    verify_s: float
    host_s: float
    plain_s: float  # what plain decoding would have taken for the tokens emitted: modelled
    num_running: int  # requests, after the step
    num_waiting: int
    num_blocks_used: int  # cache blocks that requests own
    num_blocks: int
    num_preempted: int  # requests that gave up their blocks in this step
    faults: tuple[str, ...]  # drafter failures in this step, by reason

    @property
    def num_emitted(self) -> int:
        return sum(row.num_emitted for row in self.sampled)

    @property
    def saved_s(self) -> float:
        """Seconds that this step saved against plain decoding; negative: it cost some."""
        return self.plain_s - (self.draft_s + self.verify_s + self.host_s)


def add_counts(parts: list[RequestStats]) -> Counters:
    """Add up the counts of several requests. Seconds of shared steps count once per request."""
    total = Counters()
    for part in parts:
        for name in ("num_steps", "num_drafts", "num_drafted", "num_accepted", "num_emitted"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        _add_positions(total.offered_by_position, part.offered_by_position)
        _add_positions(total.accepted_by_position, part.accepted_by_position)
        total.count_time(part.draft_s, part.verify_s, part.host_s)
        total.num_preemptions += part.num_preemptions
        total.num_cached_tokens += part.num_cached_tokens
        for reason, count in part.drafter_faults.items():
            total.drafter_faults[reason] = total.drafter_faults.get(reason, 0) + count
    return total


def _count_up_to(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
    for position in range(length):
        counts[position] += 1


def _add_positions(total: list[int], counts: tuple[int, ...]) -> None:
    total.extend([0] * (len(counts) - len(total)))
    for position, count in enumerate(counts):
        total[position] += count
