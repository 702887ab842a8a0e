"""What an answer cost, in the shapes that clients read: usage, vLLM's metrics, llama's timings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.results import GenerationResult
from ..engine.stats import RequestStats

__all__ = ["costs_of", "metrics_of", "usage_of"]


def usage_of(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    """Count tokens in OpenAI's shape."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def metrics_of(stats: RequestStats, max_draft: int) -> dict[str, Any]:
    """Tell times and drafts in vLLM's shape; also when nothing was drafted.

    `num_spec_steps` counts the steps that drafted, as vLLM does; `num_steps` all of them.
    """
    generation_s = max(stats.e2e_s - stats.ttft_s, 0.0)
    return {
        "time_to_first_token_ms": _ms(stats.ttft_s),
        "generation_time_ms": _ms(generation_s),
        "queue_time_ms": _ms(stats.queue_s),
        "mean_itl_ms": _ms(stats.tpot_s),
        "tokens_per_second": _rate(stats.num_emitted - 1, generation_s),
        "speculative_decoding": {
            "mean_acceptance_length": 1 + stats.num_accepted / max(1, stats.num_drafts),
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_histogram": _histogram(stats, max_draft),
            "num_spec_steps": stats.num_drafts,
            "num_accepted_draft_tokens": stats.num_accepted,
            "num_draft_tokens": stats.num_drafted,
            "num_spec_tokens": max_draft,
            "num_steps": stats.num_steps,
            "num_emitted_tokens": stats.num_emitted,
            "fallbacks": dict(stats.drafter_faults),
        },
    }


def costs_of(results: Sequence[GenerationResult | None], max_draft: int) -> dict[str, Any]:
    """Tell what an answer took, where there is just one and it has ended."""
    if len(results) != 1 or results[0] is None:
        return {}
    stats = results[0].stats
    return {"metrics": metrics_of(stats, max_draft), "timings": timings_of(stats)}


def timings_of(stats: RequestStats) -> dict[str, Any]:
    """Tell times and drafts in llama-server's shape."""
    prompt_s = max(stats.ttft_s - stats.queue_s, 0.0)
    predicted_s = max(stats.e2e_s - stats.ttft_s, 0.0)
    num_prompt = stats.num_prompt_tokens - stats.num_cached_tokens
    return {
        "cache_n": stats.num_cached_tokens,
        "prompt_n": num_prompt,
        "prompt_ms": _ms(prompt_s),
        "prompt_per_token_ms": _ms(prompt_s / max(1, num_prompt)),
        "prompt_per_second": _rate(num_prompt, prompt_s),
        "predicted_n": stats.num_emitted,
        "predicted_ms": _ms(predicted_s),
        "predicted_per_token_ms": _ms(stats.tpot_s),
        "predicted_per_second": _rate(stats.num_emitted - 1, predicted_s),
        "draft_n": stats.num_drafted,
        "draft_n_accepted": stats.num_accepted,
    }


def _histogram(stats: RequestStats, max_draft: int) -> list[int]:
    """How many of the drafting steps accepted 0, 1, ... max_draft tokens."""
    reached: Sequence[int] = [stats.num_drafts, *stats.accepted_by_position]
    reached = [*reached, *[0] * (max_draft + 2 - len(reached))]
    return [reached[i] - reached[i + 1] for i in range(max_draft + 1)]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if count > 0 and seconds > 0 else 0.0
