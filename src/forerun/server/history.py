"""What an engine did of late, second by second, for the dashboard; and whether it looks healthy.

Memory is bounded: a ring of one-second bins, a ring of events, counts by bounded keys.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..engine.stats import RequestStats, StepReport
from ..types import FinishReason
from .metric_bins import SERIES, Bin, ratio, writable
from .metric_counts import ByReason, DraftTable, Latencies

__all__ = ["History"]

NUM_BINS = 900  # seconds that can be looked back on
NUM_EVENTS = 200
# Health is judged by the last minute, and only if enough happened in it.
HEALTH_WINDOW_S = 60
MANY_STEPS = 200
MANY_DRAFTED = 500
COLLAPSED_RATE = 0.05  # a drafter that fits is never so bad; wrong weights give about 0.01
BREAK_EVEN = 1.0
CLEAR_LOSS = 0.95
# Reasons for not drafting that say nothing about the drafter.
HARMLESS = frozenset({"not_wanted", "at_its_end"})

Clock = Callable[[], float]


class History:
    """The last quarter of an hour of one engine. Every method may be called from any thread."""

    def __init__(self, method: str = "none", *, clock: Clock | None = None) -> None:
        self._is_drafting = method != "none"  # as far as somebody wants it
        self._method = method
        self._clock = clock or _steady_unix_clock()
        self._lock = threading.Lock()
        self._bins: deque[Bin] = deque(maxlen=NUM_BINS)  # the seconds in which something happened
        self._events: deque[dict[str, Any]] = deque(maxlen=NUM_EVENTS)
        self._start = int(self._clock())
        self._drafts = DraftTable()
        self._idle = ByReason()
        self._recent_idle: deque[tuple[int, ByReason]] = deque(maxlen=HEALTH_WINDOW_S)
        self._totals = dict.fromkeys(
            ("requests", "prompt_tokens", "cached_tokens", "preemptions", "fallbacks"), 0
        )
        self._saved_s = 0.0

    def on_step(self, report: StepReport) -> None:
        """Count a step. In the engine's thread, so it is cheap: microseconds."""
        with self._lock:
            now = self._current()
            now.count_step(report)
            for row in report.sampled:
                self._drafts.count(row)
                if row.idle_reason is not None:
                    self._idle.count(row.idle_reason)
                    self._recent_idle[-1][1].count(row.idle_reason)
            self._totals["preemptions"] += report.num_preempted
            self._totals["fallbacks"] += len(report.faults)
            self._saved_s += report.saved_s

    def on_finished(self, stats: RequestStats, reason: FinishReason) -> None:
        """Count a request that ended."""
        with self._lock:
            self._current().count_finished(Latencies.of(stats, reason))
            self._totals["requests"] += 1
            self._totals["prompt_tokens"] += stats.num_prompt_tokens
            self._totals["cached_tokens"] += stats.num_cached_tokens

    def event(self, kind: str, text: str) -> None:
        """Note something that happened once, to be shown beside the curves."""
        with self._lock:
            self._events.append({"time_s": self._clock(), "kind": kind, "text": text})

    def set_enabled(self, enabled: bool, reason: str) -> None:
        """Say whether speculation is wanted; where it is not, its absence is no fault."""
        if enabled == self._is_drafting:
            return
        self._is_drafting = enabled
        self.event("speculation", f"turned {'on' if enabled else 'off'}: {reason}")

    def snapshot(self, since_s: float | None) -> dict[str, Any]:
        """Say everything, ready for JSON; series and events from `since_s` on.

        Totals, positions, histogram and idle reasons are those since the start. The second of
        `since_s` itself comes again, since it may have grown; events at it or before do not.
        """
        if since_s is not None and not math.isfinite(since_s):
            since_s = None
        with self._lock:
            now_s = self._clock()
            drafts = self._drafts
            first = max(self._start, int(now_s) - NUM_BINS + 1, int(since_s or 0))
            rows = {each.second: each.values() for each in self._bins if each.second >= first}
            told = {
                "now_s": now_s,
                "totals": {
                    "steps": drafts.num_steps,
                    "drafts": drafts.num_drafts,
                    "drafted": drafts.num_drafted,
                    "accepted": drafts.num_accepted,
                    "emitted": drafts.num_emitted,
                    "saved_s": writable(self._saved_s),
                    **self._totals,
                },
                "series": {},
                "by_position": {
                    "offered": drafts.offered_by_position(),
                    "accepted": drafts.accepted_by_position(),
                },
                "accepted_histogram": drafts.accepted_counts(),
                "idle_reasons": dict(self._idle),
                "events": [
                    dict(event)
                    for event in self._events
                    if since_s is None or event["time_s"] > since_s
                ],
            }
        # What takes time is done without the lock: the engine must not wait for it.
        seconds = range(first, max(int(now_s), *rows, 0) + 1)
        told["series"] = _columns(seconds, rows)
        return told

    def health(self) -> list[dict[str, str]]:
        """Judge the last minute: [{"level": "ok" | "warn" | "bad", "text": ...}], never empty."""
        with self._lock:
            oldest = int(self._clock()) - HEALTH_WINDOW_S
            bins = [each for each in self._bins if each.second > oldest]
            idle = _merge([counts for second, counts in self._recent_idle if second > oldest])
            findings = self._find(bins, idle) if self._is_drafting else []
            if findings:
                return findings
            if not self._is_drafting:
                return [_finding("ok", "speculation is off")]
            if sum(each.num_steps for each in bins) < MANY_STEPS:
                return [_finding("ok", "too few steps in the last minute to judge")]
            return [_finding("ok", "speculation works")]

    def _find(self, bins: list[Bin], idle: dict[str, int]) -> list[dict[str, str]]:
        findings = []
        num_steps = sum(each.num_steps for each in bins)
        num_drafted = sum(each.num_drafted for each in bins)
        num_able = num_steps - sum(idle.get(reason, 0) for reason in HARMLESS)
        if num_able >= MANY_STEPS and not num_drafted:
            why = {reason: count for reason, count in idle.items() if reason not in HARMLESS}
            cause = f", mostly {max(why, key=lambda reason: why[reason])}" if why else ""
            findings.append(
                _finding(
                    "warn" if self._drafts.num_drafts else "bad",
                    f"speculation silently off: {self._method} drafted nothing in {num_able} "
                    f"steps of the last minute{cause}",
                )
            )
        accepted_rate = ratio(sum(each.num_accepted for each in bins), num_drafted)
        if (
            num_drafted >= MANY_DRAFTED
            and accepted_rate is not None
            and accepted_rate < COLLAPSED_RATE
        ):
            findings.append(
                _finding(
                    "bad",
                    f"acceptance collapsed: {accepted_rate:.1%} of {num_drafted} draft tokens "
                    "were accepted in the last minute; does the drafter fit the model?",
                )
            )
        speedup = ratio(sum(e.plain_s for e in bins), sum(e.actual_s for e in bins))
        if num_steps >= MANY_STEPS and speedup is not None and speedup < BREAK_EVEN:
            findings.append(
                _finding(
                    "bad" if speedup < CLEAR_LOSS else "warn",
                    f"speculation costs time: {speedup:.2f} times the speed of plain decoding in "
                    "the last minute",
                )
            )
        return findings

    def _current(self) -> Bin:
        """Get this second's bin; the one before it is closed."""
        second = int(self._clock())
        if self._bins and second <= self._bins[-1].second:  # a clock may be set back
            return self._bins[-1]
        if self._bins:
            self._bins[-1].close()
        self._bins.append(Bin(second))
        self._recent_idle.append((second, ByReason()))
        return self._bins[-1]


def _columns(
    seconds: range, rows: dict[int, tuple[float | None, ...]]
) -> dict[str, list[float | None]]:
    """Turn rows into one list per series; seconds without a row are those of an idle engine."""
    idle = Bin(0).values()
    columns = zip(*(rows.get(second, idle) for second in seconds), strict=True)
    named = dict(zip(SERIES, map(list, columns), strict=False)) or {name: [] for name in SERIES}
    return {"time_s": [float(second) for second in seconds], **named}


def _steady_unix_clock() -> Clock:
    """Make a clock that shows unix time and never jumps, whatever is done to the system's."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()


def _merge(parts: list[ByReason]) -> dict[str, int]:
    total: dict[str, int] = {}
    for counts in parts:
        for reason, count in counts.items():
            total[reason] = total.get(reason, 0) + count
    return total


def _finding(level: str, text: str) -> dict[str, str]:
    return {"level": level, "text": text}
