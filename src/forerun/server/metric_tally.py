"""Everything that `/metrics` tells, as running totals: what a step or a request adds to them.

No names, no locks: those are in `metric_names` and `metrics`.
"""

from __future__ import annotations

from ..engine.stats import RequestStats, StepReport
from ..params import SamplingParams
from ..types import FinishReason
from .metric_counts import (
    ByReason,
    DraftTable,
    Histogram,
    Latencies,
    buckets_1_2_5,
    count_buckets,
)

__all__ = ["Tally"]

# vLLM's bounds, and finer ones before them where a small model answers sooner than the first.
TTFT_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TPOT_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0),
    *(10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
SIZE_BUCKETS = tuple(float(2**power) for power in range(15))  # 1 .. 16384
PARAMS_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
NO_METHOD = "none"


class Tally:
    """Running totals of one engine."""

    def __init__(self, max_draft: int, max_model_len: int, method: str) -> None:
        methods = dict.fromkeys((NO_METHOD, method))
        lengths = buckets_1_2_5(max_model_len)
        self.max_draft = max_draft  # at present
        self.num_positions = max_draft  # that are there from the start, so that rates work
        self.max_model_len = max_model_len
        self.is_enabled = max_draft > 0 and method != NO_METHOD
        self.draft_cost_ratio: float | None = None  # None: not measured
        self.verify_growth: float | None = None
        self.draft_buckets = count_buckets(max_draft)
        # of steps
        self.drafts = DraftTable(methods)
        self.draft_s: dict[str, float] = dict.fromkeys(methods, 0.0)  # by method, as the next two
        self.verify_s: dict[str, float] = dict.fromkeys(methods, 0.0)
        self.host_s: dict[str, float] = dict.fromkeys(methods, 0.0)
        self.saved_s = 0.0
        self.lost_s = 0.0
        self.idle = ByReason()
        self.fallbacks = ByReason()
        self.drift_events = ByReason()
        self.batch_sizes = Histogram(SIZE_BUCKETS)
        self.step_rows = Histogram(SIZE_BUCKETS)
        self.step_tokens = Histogram(SIZE_BUCKETS)
        self.num_prompt_computed = 0
        self.num_preemptions = 0
        self.num_running = 0
        self.num_waiting = 0
        self.num_blocks_used = 0
        self.num_blocks = 0
        # of requests
        self.num_prompt_tokens = 0
        self.num_prompt_queried = 0
        self.num_prompt_cached = 0
        self.finished = ByReason(reason.value for reason in FinishReason)
        self.rejections = ByReason()
        self.ttft_s = Histogram(TTFT_BUCKETS)
        self.tpot_s = Histogram(TPOT_BUCKETS)
        self.e2e_s = Histogram(REQUEST_BUCKETS)
        self.queue_s = Histogram(REQUEST_BUCKETS)
        self.request_prompt_tokens = Histogram(lengths)
        self.request_emitted = Histogram(lengths)
        self.params_n = Histogram(PARAMS_N_BUCKETS)
        self.params_max_tokens = Histogram(lengths)

    def count_step(self, report: StepReport) -> None:
        """Count a step. Called in the engine's thread, between two passes: it must be quick."""
        drafts = self.drafts
        rows_by_method: dict[str, int] = {}
        emitted = drafts.num_emitted
        for row in report.sampled:
            method = drafts.count(row)
            rows_by_method[method] = rows_by_method.get(method, 0) + 1
            if row.idle_reason is not None:
                self.idle.count(row.idle_reason)
        self._share_out(report, rows_by_method or {NO_METHOD: 1})
        saved_s = report.saved_s
        if saved_s > 0:
            self.saved_s += saved_s
        elif saved_s < 0:
            self.lost_s -= saved_s
        for reason in report.faults:
            self.fallbacks.count(reason)
        self.batch_sizes.observe(report.num_requests)
        self.step_rows.observe(report.num_rows)
        self.step_tokens.observe(report.num_prompt_tokens + drafts.num_emitted - emitted)
        self.num_prompt_computed += report.num_prompt_tokens
        self.num_preemptions += report.num_preempted
        self.num_blocks = report.num_blocks
        self.set_load(report.num_running, report.num_waiting, report.num_blocks_used)

    def _share_out(self, report: StepReport, rows_by_method: dict[str, int]) -> None:
        """Give each method its rows' share of the step's seconds.

        Drafting is what the methods that were asked took: rows of "none" have no part in it.
        """
        total = sum(rows_by_method.values())
        asked = total - rows_by_method.get(NO_METHOD, 0)
        for method, rows in rows_by_method.items():
            share = rows / total
            add_s(self.verify_s, method, report.verify_s * share)
            add_s(self.host_s, method, report.host_s * share)
            if not asked:
                add_s(self.draft_s, method, report.draft_s * share)
            elif method != NO_METHOD:
                add_s(self.draft_s, method, report.draft_s * rows / asked)

    def set_load(self, num_running: int, num_waiting: int, num_blocks_used: int) -> None:
        """Note who is there."""
        self.num_running = num_running
        self.num_waiting = num_waiting
        self.num_blocks_used = num_blocks_used

    def count_started(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Count a prompt that was taken in, whatever number of answers it asks for."""
        self.num_prompt_tokens += num_prompt_tokens
        self.params_n.observe(params.n)

    def count_finished(
        self, stats: RequestStats, reason: FinishReason, params: SamplingParams
    ) -> None:
        """Count one answer that came to its end."""
        self.finished.count(reason.value)
        self.num_prompt_queried += stats.num_prompt_tokens
        self.num_prompt_cached += stats.num_cached_tokens
        self.request_prompt_tokens.observe(stats.num_prompt_tokens)
        self.request_emitted.observe(stats.num_emitted)
        room = self.max_model_len - stats.num_prompt_tokens
        self.params_max_tokens.observe(room if params.max_tokens is None else params.max_tokens)
        latencies = Latencies.of(stats, reason)
        for histogram, value in (
            (self.ttft_s, latencies.ttft_s),
            (self.tpot_s, latencies.tpot_s),
            (self.e2e_s, latencies.e2e_s),
            (self.queue_s, latencies.queue_s),
        ):
            if value is not None:
                histogram.observe(value)


def add_s(seconds: dict[str, float], method: str, more_s: float) -> None:
    """Add to the seconds of a method."""
    seconds[method] = seconds.get(method, 0.0) + more_s
