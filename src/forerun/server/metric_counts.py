"""What metrics and dashboard count with: bounded labels, histograms, drafts by length and fate.

Plain numbers without locks. Nothing here knows how they are named or written out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..engine.stats import RequestStats, SampledRow
from ..types import FinishReason

__all__ = [
    "MAX_LABELS",
    "OTHER",
    "ByReason",
    "DraftTable",
    "Histogram",
    "LabelSet",
    "Latencies",
    "buckets_1_2_5",
    "count_buckets",
]

MAX_LABELS = 32  # distinct values of one label; every further one is counted as OTHER
OTHER = "other"


class LabelSet:
    """The values that a label has taken; once they are too many, new ones are called OTHER."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = set(known)

    def admit(self, value: str) -> str:
        """Say under which name to count `value`."""
        if value in self._known:
            return value
        if len(self._known) >= MAX_LABELS:
            return OTHER
        self._known.add(value)
        return value


class ByReason(dict[str, int]):
    """Counts by reason, at most `MAX_LABELS` and one for all others."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        super().__init__(dict.fromkeys(known, 0))
        self._labels = LabelSet(self)

    def count(self, reason: str) -> None:
        """Count one more."""
        reason = self._labels.admit(reason)
        self[reason] = self.get(reason, 0) + 1


class Histogram:
    """How many values were at most each bound, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)  # ascending; the bucket without a bound follows them
        self.counts = [0] * (len(self.bounds) + 1)  # by bucket, not cumulative
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> Histogram:
        """Keep what it says now."""
        twin = Histogram(self.bounds)
        twin.counts, twin.sum = list(self.counts), self.sum
        return twin


class DraftTable:
    """How often each (method, drafted, accepted) came up among the requests of all steps.

    All that is said of drafts follows from it, so no two numbers can disagree; but for how deep
    drafts were, which of trees it does not tell. Its size is
    bounded by the methods and the longest draft.
    """

    def __init__(self, methods: Iterable[str] = ()) -> None:
        self.methods = LabelSet(methods)
        self.num_emitted = 0
        self._rows: dict[tuple[str, int, int], int] = dict.fromkeys(((m, 0, 0) for m in methods), 0)
        self._reached: dict[int, int] = {}  # positions of a draft, which a tree has fewer of

    def count(self, row: SampledRow) -> str:
        """Count one request's part of a step; say under which method."""
        method = self.methods.admit(row.method)
        key = (method, row.num_drafted, row.num_accepted)
        self._rows[key] = self._rows.get(key, 0) + 1
        self._reached[row.num_positions] = self._reached.get(row.num_positions, 0) + 1
        self.num_emitted += row.num_emitted
        return method

    @property
    def num_steps(self) -> int:
        return sum(self._rows.values())

    @property
    def num_drafts(self) -> int:
        return sum(times for (_, drafted, _), times in self._rows.items() if drafted)

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted_by_method().values())

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_by_method().values())

    def drafted_by_method(self) -> dict[str, int]:
        """Add up draft tokens proposed."""
        total: dict[str, int] = {}
        for (method, drafted, _), times in self._rows.items():
            total[method] = total.get(method, 0) + drafted * times
        return total

    def accepted_by_method(self) -> dict[str, int]:
        """Add up draft tokens kept."""
        total: dict[str, int] = {}
        for (method, _, accepted), times in self._rows.items():
            total[method] = total.get(method, 0) + accepted * times
        return total

    def offered_by_position(self, at_least: int = 0) -> list[int]:
        """Count the drafts that reached position i, for at least so many positions."""
        return _reaching(list(self._reached.items()), at_least)

    def accepted_by_position(self, at_least: int = 0) -> list[int]:
        """Count the drafts of which position i was kept, for at least so many positions."""
        return _reaching([(key[2], times) for key, times in self._rows.items()], at_least)

    def accepted_counts(self) -> list[int]:
        """Count the drafts of which 0, 1, 2, ... tokens were kept."""
        rows = [
            (accepted, times) for (_, drafted, accepted), times in self._rows.items() if drafted
        ]
        counts = [0] * (1 + max((accepted for accepted, _ in rows), default=-1))
        for accepted, times in rows:
            counts[accepted] += times
        return counts

    def length_histogram(self, bounds: Sequence[float]) -> Histogram:
        """Lay out how long drafts were; steps without one do not count."""
        histogram = Histogram(bounds)
        for (_, drafted, _), times in self._rows.items():
            if drafted:
                histogram.observe(drafted, times)
        return histogram

    def accepted_histograms(self, bounds: Sequence[float]) -> dict[str, Histogram]:
        """Lay out how many tokens were kept, by the draft's length."""
        histograms: dict[int, Histogram] = {}
        for (_, drafted, accepted), times in self._rows.items():
            if drafted:
                histograms.setdefault(drafted, Histogram(bounds)).observe(accepted, times)
        return {str(length): histograms[length] for length in sorted(histograms)}


@dataclass(frozen=True, slots=True)
class Latencies:
    """The latencies that a finished request has; None where it has none."""

    ttft_s: float | None
    tpot_s: float | None  # (e2e - ttft) / (tokens - 1): bursts of accepted tokens do not distort it
    e2e_s: float | None
    queue_s: float | None

    @staticmethod
    def of(stats: RequestStats, reason: FinishReason) -> Latencies:
        """Take what counts: no time to a first token that never came.

        The end of a request that was cut short says nothing of how long such requests take, but
        the tokens that it got came as they came.
        """
        whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
        some = stats.num_emitted > 0
        return Latencies(
            ttft_s=stats.ttft_s if some else None,
            tpot_s=stats.tpot_s if stats.num_emitted > 1 else None,
            e2e_s=stats.e2e_s if some and whole else None,
            queue_s=stats.queue_s if stats.num_steps else None,
        )


def buckets_1_2_5(largest: int) -> tuple[float, ...]:
    """List 1, 2, 5, 10, 20, 50, ... up to `largest`; 30 -> 1, 2, 5, 10, 20."""
    bounds: list[float] = []
    scale = 1
    while scale <= largest:
        bounds.extend(each * scale for each in (1, 2, 5) if each * scale <= largest)
        scale *= 10
    return tuple(bounds)


def count_buckets(largest: int) -> tuple[float, ...]:
    """List small counts one by one and larger ones coarsely, up to `largest` and with it."""
    grid = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
    return tuple(float(each) for each in sorted({*(g for g in grid if g < largest), largest}))


def _reaching(lengths: list[tuple[int, int]], at_least: int) -> list[int]:
    counts = [0] * max(at_least, max((length for length, _ in lengths), default=0))
    for length, times in lengths:
        for position in range(length):
            counts[position] += times
    return counts
