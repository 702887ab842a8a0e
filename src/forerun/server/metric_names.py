"""The metrics by name: what each is called, its kind, its label, and which total it shows.

A table, kept by a golden test: whoever renames one breaks somebody's dashboard. All begin with
`forerun_`; vLLM's names for some of them are in `metric_vllm`. Counters are named here without the
`_total` that they get on the wire. Every metric has the label model_name too. Rates are not
exported; they are quotients of counters:

    draft acceptance rate   rate(forerun_spec_num_accepted_total) / rate(.._num_drafted_total)
    mean acceptance length  rate(forerun_spec_num_emitted_total) / rate(.._num_steps_total)
    position's rate         rate(forerun_spec_num_accepted_per_pos_total)
                            / rate(forerun_spec_num_offered_per_pos_total)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from .metric_counts import Histogram
from .metric_tally import Tally

__all__ = ["OWN", "Family", "Values"]

Kind = Literal["counter", "gauge", "histogram"]
Values = float | Histogram | Mapping[str, float] | Mapping[str, Histogram] | None


@dataclass(frozen=True, slots=True)
class Family:
    """One metric."""

    name: str
    kind: Kind
    help: str
    read: Callable[[Tally], Values]  # by the label's value, if it has one; None: not known
    label: str | None = None


def by_position(counts: list[int]) -> dict[str, float]:
    """Label counts by their position, from 0."""
    return {str(position): count for position, count in enumerate(counts)}


OWN: tuple[Family, ...] = (
    # Speculation. A step is one request's part of a pass, as in the glossary's num_steps.
    Family(
        "forerun_spec_num_steps",
        "counter",
        "Verify passes of requests that had caught up, those without a draft included.",
        lambda tally: tally.drafts.num_steps,
    ),
    Family(
        "forerun_spec_num_drafts",
        "counter",
        "Those of the steps in which at least one token was drafted.",
        lambda tally: tally.drafts.num_drafts,
    ),
    Family(
        "forerun_spec_num_drafted",
        "counter",
        "Draft tokens proposed.",
        lambda tally: tally.drafts.drafted_by_method(),
        "method",
    ),
    Family(
        "forerun_spec_num_accepted",
        "counter",
        "Draft tokens that reached the output; never the target's own token.",
        lambda tally: tally.drafts.accepted_by_method(),
        "method",
    ),
    Family(
        "forerun_spec_num_emitted",
        "counter",
        "Output tokens: accepted ones and the target's own.",
        lambda tally: tally.drafts.num_emitted,
    ),
    Family(
        "forerun_spec_num_offered_per_pos",
        "counter",
        "Drafts that reached position i, counted from 0.",
        lambda tally: by_position(tally.drafts.offered_by_position(tally.num_positions)),
        "position",
    ),
    Family(
        "forerun_spec_num_accepted_per_pos",
        "counter",
        "Drafts of which the token at position i was accepted.",
        lambda tally: by_position(tally.drafts.accepted_by_position(tally.num_positions)),
        "position",
    ),
    Family(
        "forerun_spec_accepted_tokens",
        "histogram",
        "Draft tokens accepted of one draft, by its length.",
        lambda tally: tally.drafts.accepted_histograms(tally.draft_buckets),
        "draft_length",
    ),
    Family(
        "forerun_spec_draft_length",
        "histogram",
        "Tokens of a draft; steps without a draft do not count.",
        lambda tally: tally.drafts.length_histogram(tally.draft_buckets),
    ),
    Family(
        "forerun_spec_draft_seconds",
        "counter",
        "Time spent guessing. A step's seconds are shared by rows where methods meet in it.",
        lambda tally: tally.draft_s,
        "method",
    ),
    Family(
        "forerun_spec_verify_seconds",
        "counter",
        "Time spent in the target's passes and deciding.",
        lambda tally: tally.verify_s,
        "method",
    ),
    Family(
        "forerun_spec_overhead_seconds",
        "counter",
        "Time spent on the host around them: scheduling, committing, text.",
        lambda tally: tally.host_s,
        "method",
    ),
    Family(
        "forerun_spec_saved_seconds",
        "counter",
        "Seconds won against the modelled time of plain decoding, by steps that won. The balance "
        "is this less forerun_spec_lost_seconds_total.",
        lambda tally: tally.saved_s,
    ),
    Family(
        "forerun_spec_lost_seconds",
        "counter",
        "Seconds lost against the modelled time of plain decoding, by steps that lost.",
        lambda tally: tally.lost_s,
    ),
    Family(
        "forerun_spec_idle",
        "counter",
        "Steps of a request without a draft, by why.",
        lambda tally: tally.idle,
        "reason",
    ),
    Family(
        "forerun_spec_fallback",
        "counter",
        "Fallbacks to plain decoding: drafter failures, and speculation turned off.",
        lambda tally: tally.fallbacks,
        "reason",
    ),
    Family(
        "forerun_spec_drift_events",
        "counter",
        "Times that acceptance or cost was found to have moved.",
        lambda tally: tally.drift_events,
        "reason",
    ),
    Family(
        "forerun_spec_enabled",
        "gauge",
        "Whether speculation is on.",
        lambda tally: float(tally.is_enabled),
    ),
    Family(
        "forerun_spec_max_draft",
        "gauge",
        "Most draft tokens per request and step, at present.",
        lambda tally: tally.max_draft,
    ),
    Family(
        "forerun_spec_draft_cost_ratio",
        "gauge",
        "Measured time of a drafter's step over a target's step.",
        lambda tally: tally.draft_cost_ratio,
    ),
    Family(
        "forerun_spec_verify_growth",
        "gauge",
        "Measured time of a pass over 1 + max_draft rows over that of one row.",
        lambda tally: tally.verify_growth,
    ),
    # Steps of the engine: one pass for all requests that take part.
    Family(
        "forerun_batch_size",
        "histogram",
        "Requests that took part in a pass; its count is the number of passes.",
        lambda tally: tally.batch_sizes,
    ),
    Family(
        "forerun_step_rows",
        "histogram",
        "Tokens computed in a pass: prompt pieces, decoded tokens and drafts.",
        lambda tally: tally.step_rows,
    ),
    Family(
        "forerun_step_tokens",
        "histogram",
        "Prompt tokens computed and output tokens emitted in a pass.",
        lambda tally: tally.step_tokens,
    ),
    Family(
        "forerun_prompt_tokens_computed",
        "counter",
        "Prompt tokens computed, those computed again after preemption included.",
        lambda tally: tally.num_prompt_computed,
    ),
    Family(
        "forerun_preemptions",
        "counter",
        "Times that a request gave up its cache blocks.",
        lambda tally: tally.num_preemptions,
    ),
    Family(
        "forerun_requests_running",
        "gauge",
        "Requests that steps work on.",
        lambda tally: tally.num_running,
    ),
    Family(
        "forerun_requests_waiting",
        "gauge",
        "Requests that wait for a place.",
        lambda tally: tally.num_waiting,
    ),
    Family(
        "forerun_cache_blocks_used",
        "gauge",
        "Cache blocks that requests own.",
        lambda tally: tally.num_blocks_used,
    ),
    Family(
        "forerun_cache_blocks",
        "gauge",
        "Cache blocks that there are.",
        lambda tally: tally.num_blocks,
    ),
    Family(
        "forerun_max_model_len",
        "gauge",
        "Most tokens of a request, prompt and output.",
        lambda tally: tally.max_model_len,
    ),
    # Requests. A prompt with n answers is one that was taken in and n that finish.
    Family(
        "forerun_prompt_tokens",
        "counter",
        "Tokens of the prompts that were taken in, once per prompt.",
        lambda tally: tally.num_prompt_tokens,
    ),
    Family(
        "forerun_prompt_tokens_queried",
        "counter",
        "Prompt tokens of finished requests, looked up in the prefix cache.",
        lambda tally: tally.num_prompt_queried,
    ),
    Family(
        "forerun_prompt_tokens_cached",
        "counter",
        "Prompt tokens of finished requests that the prefix cache held.",
        lambda tally: tally.num_prompt_cached,
    ),
    Family(
        "forerun_requests_finished",
        "counter",
        "Requests that ended, by why.",
        lambda tally: tally.finished,
        "finished_reason",
    ),
    Family(
        "forerun_admission_rejections",
        "counter",
        "Requests that were turned away before they were queued.",
        lambda tally: tally.rejections,
        "reason",
    ),
    Family(
        "forerun_ttft_seconds",
        "histogram",
        "Arrival to first token, of requests that got one.",
        lambda tally: tally.ttft_s,
    ),
    Family(
        "forerun_tpot_seconds",
        "histogram",
        "(end to end - first token) / (tokens - 1), one value per request.",
        lambda tally: tally.tpot_s,
    ),
    Family(
        "forerun_e2e_seconds",
        "histogram",
        "Arrival to last token, of requests that ended by themselves.",
        lambda tally: tally.e2e_s,
    ),
    Family(
        "forerun_queue_seconds",
        "histogram",
        "Arrival to first step, of requests that had one.",
        lambda tally: tally.queue_s,
    ),
    Family(
        "forerun_request_prompt_tokens",
        "histogram",
        "Prompt tokens of a finished request.",
        lambda tally: tally.request_prompt_tokens,
    ),
    Family(
        "forerun_request_emitted_tokens",
        "histogram",
        "Output tokens of a finished request.",
        lambda tally: tally.request_emitted,
    ),
    Family(
        "forerun_request_params_n",
        "histogram",
        "Answers that a prompt asked for.",
        lambda tally: tally.params_n,
    ),
    Family(
        "forerun_request_params_max_tokens",
        "histogram",
        "Most output tokens of a finished request: as asked for, or the room that was left.",
        lambda tally: tally.params_max_tokens,
    ),
)
