"""What vLLM (0.33) calls the same totals, for benchmarks and dashboards that know its names.

Only what can be filled honestly. Its inter_token_latency_seconds is left out: with several tokens
at a time it is the gap between chunks, not the latency of a token.
"""

from __future__ import annotations

from dataclasses import replace

from ..types import FinishReason
from .metric_names import OWN, Family

__all__ = ["VLLM"]

_BY_NAME = {family.name: family for family in OWN}


def _alias(vllm_name: str, own_name: str) -> Family:
    own = _BY_NAME[f"forerun_{own_name}"]
    return replace(own, name=f"vllm:{vllm_name}")


VLLM: tuple[Family, ...] = (
    _alias("num_requests_running", "requests_running"),
    _alias("num_requests_waiting", "requests_waiting"),
    Family(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Part of the cache's blocks that requests own; 1 is all.",
        lambda tally: tally.num_blocks_used / max(1, tally.num_blocks),
    ),
    _alias("prefix_cache_queries", "prompt_tokens_queried"),
    _alias("prefix_cache_hits", "prompt_tokens_cached"),
    _alias("num_preemptions", "preemptions"),
    _alias("prompt_tokens", "prompt_tokens"),
    _alias("generation_tokens", "spec_num_emitted"),
    _alias("iteration_tokens_total", "step_tokens"),
    Family(
        "vllm:request_success",
        "counter",
        "Requests that ended, by why; what was cancelled is called abort here.",
        lambda tally: {
            "abort" if reason == FinishReason.CANCELLED else reason: count
            for reason, count in tally.finished.items()
        },
        "finished_reason",
    ),
    _alias("admission_rejections", "admission_rejections"),
    _alias("time_to_first_token_seconds", "ttft_seconds"),
    _alias("request_time_per_output_token_seconds", "tpot_seconds"),
    _alias("e2e_request_latency_seconds", "e2e_seconds"),
    _alias("request_queue_time_seconds", "queue_seconds"),
    _alias("request_prompt_tokens", "request_prompt_tokens"),
    _alias("request_generation_tokens", "request_emitted_tokens"),
    _alias("request_params_n", "request_params_n"),
    _alias("request_params_max_tokens", "request_params_max_tokens"),
    _alias("spec_decode_num_drafts", "spec_num_drafts"),
    Family(
        "vllm:spec_decode_num_draft_tokens",
        "counter",
        "Draft tokens proposed.",
        lambda tally: tally.drafts.num_drafted,
    ),
    Family(
        "vllm:spec_decode_num_accepted_tokens",
        "counter",
        "Draft tokens accepted.",
        lambda tally: tally.drafts.num_accepted,
    ),
    _alias("spec_decode_num_accepted_tokens_per_pos", "spec_num_accepted_per_pos"),
)
