"""One second of an engine's life: what the dashboard's curves are made of.

While a second lasts it keeps the latencies of the requests that finished in it; when it is over
only one number for each curve is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..engine.stats import StepReport
from .metric_counts import Latencies

__all__ = ["SERIES", "Bin"]

MAX_SAMPLES = 1024  # latencies kept of a second; no engine here finishes so many requests in one
PERCENTILES = {  # series: (latency, percentile)
    "tpot_p50_ms": ("tpot_s", 50),
    "tpot_p95_ms": ("tpot_s", 95),
    "tpot_p99_ms": ("tpot_s", 99),
    "ttft_p50_ms": ("ttft_s", 50),
    "ttft_p95_ms": ("ttft_s", 95),
    "e2e_p50_ms": ("e2e_s", 50),
    "queue_p50_ms": ("queue_s", 50),
}
LATENCIES = ("tpot_s", "ttft_s", "e2e_s", "queue_s")
SERIES = (
    *("steps", "drafted", "accepted", "emitted", "acceptance_rate", "mean_acceptance_length"),
    *PERCENTILES,
    *("draft_ms", "verify_ms", "host_ms", "speedup", "batch_size", "draft_length"),
    *("running", "waiting", "cache_usage", "wasted_tokens_per_s"),
)


class Bin:
    """What happened in one second. Counts begin at 0; what nothing was measured of is None."""

    __slots__ = (
        *("second", "num_passes", "num_requests", "num_steps", "num_drafts", "num_drafted"),
        *("num_accepted", "num_emitted", "draft_s", "verify_s", "host_s", "plain_s"),
        *("num_running", "num_waiting", "cache_usage", "_samples", "_values"),
    )

    def __init__(self, second: int) -> None:
        self.second = second  # unix time
        self.num_passes = 0  # of the target, each for all requests that took part
        self.num_requests = 0  # that took part, summed over passes
        self.num_steps = 0  # of requests that had caught up
        self.num_drafts = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_emitted = 0
        self.draft_s = 0.0
        self.verify_s = 0.0
        self.host_s = 0.0
        self.plain_s = 0.0
        self.num_running: int | None = None  # after the second's last step, as the next two
        self.num_waiting: int | None = None
        self.cache_usage: float | None = None
        self._samples: dict[str, list[float]] = {}
        self._values: tuple[float | None, ...] | None = None  # once it is over

    def count_step(self, report: StepReport) -> None:
        """Count a step."""
        self.num_passes += 1
        self.num_requests += report.num_requests
        for row in report.sampled:
            self.num_steps += 1
            self.num_drafts += row.num_drafted > 0
            self.num_drafted += row.num_drafted
            self.num_accepted += row.num_accepted
            self.num_emitted += row.num_emitted
        self.draft_s += report.draft_s
        self.verify_s += report.verify_s
        self.host_s += report.host_s
        self.plain_s += report.plain_s
        self.num_running = report.num_running
        self.num_waiting = report.num_waiting
        self.cache_usage = ratio(report.num_blocks_used, report.num_blocks)

    def count_finished(self, latencies: Latencies) -> None:
        """Note the latencies of a request that finished."""
        for name in LATENCIES:
            value = getattr(latencies, name)
            samples = self._samples.setdefault(name, [])
            if value is not None and len(samples) < MAX_SAMPLES:
                samples.append(value)

    def close(self) -> None:
        """End the second: nothing is added from now on."""
        self._values, self._samples = self.values(), {}

    @property
    def num_samples(self) -> int:
        """How many latencies it holds at present."""
        return sum(map(len, self._samples.values()))

    @property
    def actual_s(self) -> float:
        return self.draft_s + self.verify_s + self.host_s

    def _percentiles(self) -> dict[str, float]:
        ordered = {name: sorted(samples) for name, samples in self._samples.items() if samples}
        return {
            series: percentile(ordered[name], percent) * 1e3
            for series, (name, percent) in PERCENTILES.items()
            if name in ordered
        }

    def values(self) -> tuple[float | None, ...]:
        """Say the value of every one of `SERIES`."""
        if self._values is not None:
            return self._values
        passes = self.num_passes
        values: dict[str, float | None] = {
            "steps": self.num_steps,
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
            "emitted": self.num_emitted,
            "acceptance_rate": ratio(self.num_accepted, self.num_drafted),
            "mean_acceptance_length": ratio(self.num_emitted, self.num_steps),
            "draft_ms": ratio(self.draft_s * 1e3, passes),
            "verify_ms": ratio(self.verify_s * 1e3, passes),
            "host_ms": ratio(self.host_s * 1e3, passes),
            "speedup": ratio(self.plain_s, self.actual_s),
            "batch_size": ratio(self.num_requests, passes),
            "draft_length": ratio(self.num_drafted, self.num_drafts),
            "running": self.num_running,
            "waiting": self.num_waiting,
            "cache_usage": self.cache_usage,
            "wasted_tokens_per_s": self.num_drafted - self.num_accepted,  # a bin is a second
        }
        values.update(self._percentiles())
        return tuple(writable(values.get(series)) for series in SERIES)


def ratio(part: float, whole: float) -> float | None:
    """Divide; None where there is nothing to divide by."""
    return part / whole if whole else None


def writable(value: float | None) -> float | None:
    """Make a number fit for JSON: finite, and no longer than anybody reads."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, 6)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolate between the neighbours of a rank; [1, 2], 50 -> 1.5."""
    rank = percent / 100 * (len(ordered) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)
