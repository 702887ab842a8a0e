"""Metrics for Prometheus: hears of steps and requests, writes out totals when asked.

Each engine has its own registry. A step only adds to plain numbers (`metric_tally`); names are put
to them (`metric_names`, `metric_vllm`) when somebody scrapes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import (
    CONTENT_TYPE_PLAIN_0_0_4,
    choose_encoder,
    generate_latest,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..engine.stats import RequestStats, StepReport
from ..params import SamplingParams
from ..types import FinishReason
from .metric_counts import Histogram
from .metric_names import OWN, Family, Values
from .metric_tally import NO_METHOD, Tally
from .metric_vllm import VLLM

__all__ = ["Metrics"]


class Metrics:
    """The metrics of one engine. Every method may be called from any thread."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4  # of what `render` returns

    def __init__(
        self,
        model_name: str,
        max_draft: int,
        max_model_len: int,
        *,
        method: str = NO_METHOD,  # what the drafter is called, so that it is there from the start
        compat_vllm: bool = True,
    ) -> None:
        self._tally = Tally(max_draft, max_model_len, method)
        self._lock = threading.Lock()
        self.registry = CollectorRegistry()
        families = (*OWN, *VLLM) if compat_vllm else OWN
        self.registry.register(_Reader(self._tally, self._lock, families, model_name))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def on_step(self, report: StepReport) -> None:
        """Count a step. In the engine's thread, so it is cheap: microseconds."""
        with self._lock:
            self._tally.count_step(report)

    def on_request_started(self, prompt_tokens: int, params: SamplingParams) -> None:
        """Count a prompt that was taken in: once, whatever `params.n`."""
        with self._lock:
            self._tally.count_started(prompt_tokens, params)

    def on_request_finished(
        self, stats: RequestStats, reason: FinishReason, params: SamplingParams
    ) -> None:
        """Count an answer that came to its end: `params.n` times for a prompt."""
        with self._lock:
            self._tally.count_finished(stats, reason, params)

    def on_rejected(self, reason: str) -> None:
        """Count a request that was turned away."""
        with self._lock:
            self._tally.rejections.count(reason)

    def on_drift(self, reason: str) -> None:
        """Count that acceptance or cost was found to have moved."""
        with self._lock:
            self._tally.drift_events.count(reason)

    def set_enabled(self, enabled: bool, reason: str) -> None:
        """Say whether speculation is on; turning it off is a fallback for that reason."""
        with self._lock:
            if self._tally.is_enabled and not enabled:
                self._tally.fallbacks.count(reason)
            self._tally.is_enabled = enabled

    def set_max_draft(self, max_draft: int) -> None:
        """Say how long drafts may be from now on."""
        with self._lock:
            self._tally.max_draft = max_draft

    def set_costs(self, draft_cost_ratio: float | None, verify_growth: float | None) -> None:
        """Note what a drafter's step and a pass over 1 + max_draft rows were measured to cost."""
        with self._lock:
            self._tally.draft_cost_ratio = draft_cost_ratio
            self._tally.verify_growth = verify_growth

    def set_load(self, num_running: int, num_waiting: int, num_blocks_used: int) -> None:
        """Correct the gauges between steps, for example after a cancellation that left nothing."""
        with self._lock:
            self._tally.set_load(num_running, num_waiting, num_blocks_used)

    def render(self) -> bytes:
        """Write everything out in the text format."""
        return generate_latest(self.registry)

    def render_for(self, accept: str) -> tuple[bytes, str]:
        """Write in the format that an Accept header asks for; say its content type too."""
        try:
            encoder, content_type = choose_encoder(accept)
            return encoder(self.registry), content_type
        except (TypeError, ValueError):  # a header that makes no sense
            return self.render(), self.content_type


class _Reader(Collector):
    """Puts names to totals."""

    def __init__(
        self, tally: Tally, lock: threading.Lock, families: Iterable[Family], model_name: str
    ) -> None:
        self._tally = tally
        self._lock = lock
        self._families = tuple(families)
        self._model_name = model_name

    def collect(self) -> list[Metric]:
        with self._lock:  # one moment for all of them, and a short one: the engine waits
            values = [
                _by_labels(family.read(self._tally), self._model_name) for family in self._families
            ]
        return [_named(family, each) for family, each in zip(self._families, values, strict=True)]


def _by_labels(values: Values, model_name: str) -> dict[tuple[str, ...], float | Histogram]:
    """Copy values, by what their labels say."""
    if values is None:
        return {}
    if isinstance(values, Mapping):
        return {(model_name, key): _copied(value) for key, value in values.items()}
    return {(model_name,): _copied(values)}


def _copied(value: float | Histogram) -> float | Histogram:
    return value.copy() if isinstance(value, Histogram) else value


def _named(family: Family, values: Mapping[tuple[str, ...], float | Histogram]) -> Metric:
    names = ("model_name", *([family.label] if family.label else []))
    if family.kind == "histogram":
        histograms = HistogramMetricFamily(family.name, family.help, labels=names)
        for labels, value in values.items():
            assert isinstance(value, Histogram)
            histograms.add_metric(labels, _cumulative(value), value.sum)
        return histograms
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    numbers = make(family.name, family.help, labels=names)
    for labels, value in values.items():
        assert not isinstance(value, Histogram)
        numbers.add_metric(labels, value)
    return numbers


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    names = [*map(floatToGoString, histogram.bounds), "+Inf"]
    total = 0
    buckets: list[tuple[str, float]] = []
    for name, count in zip(names, histogram.counts, strict=True):
        total += count
        buckets.append((name, total))
    return buckets
