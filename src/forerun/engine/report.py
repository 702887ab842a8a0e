"""What a step was, for whoever watches the engine: counts, and what drafts were worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..types import RequestOutcome
from .scheduler import Plan, PlanEntry
from .stats import SampledRow

__all__ = ["num_prompt_tokens", "plain_seconds", "sampled_rows"]


def sampled_rows(
    methods: Mapping[PlanEntry, str], heard: Sequence[RequestOutcome]
) -> tuple[SampledRow, ...]:
    """Say what a step meant for each request that had caught up; `methods` say who guessed."""
    by_id = {entry.request.request_id: (entry, method) for entry, method in methods.items()}
    rows = []
    for each in heard:
        entry, method = by_id[each.request_id]
        reason = None if each.num_drafted else _idle_reason(entry)
        emitted = len(each.emitted)
        rows.append(
            SampledRow(
                method,
                each.num_drafted,
                each.num_accepted,
                emitted,
                reason,
                each.draft_depth,
            )
        )
    return tuple(rows)


def num_prompt_tokens(plan: Plan) -> int:
    """Count the tokens of prompts that a step computes."""
    parts = [
        min(each.request.num_prompt, each.start + each.num_tokens) - each.start
        for each in plan.entries
    ]
    return sum(part for part in parts if part > 0)


def plain_seconds(
    sampled: Sequence[SampledRow], num_rows: int, step_s: float, row_cost: float
) -> float:
    """Model what the tokens of a step would have taken without drafts.

    A pass over m rows costs 1 + c (m - 1) passes over one row, c being the `row_cost` measured at
    start. Without drafts the step is shorter by their rows; and each token that drafts gained, in
    the mean of the requests, would have needed one more pass, over one row of each: prompts that
    were computed beside would not have been computed again.

    Example: c = 0.1, one request, drafts of 4 in 5 rows, all accepted, 140 ms. One row: 100 ms;
    four more tokens: 400 ms. In all 500 ms.
    """
    num_drafted = sum(row.num_drafted for row in sampled)
    if not num_drafted:
        return step_s

    def pass_s(rows: int) -> float:
        return step_s * (1 + row_cost * (rows - 1)) / (1 + row_cost * (num_rows - 1))

    gained = sum(max(0, row.num_emitted - 1) for row in sampled) / len(sampled)
    return pass_s(num_rows - num_drafted) + gained * pass_s(len(sampled))


def _idle_reason(entry: PlanEntry) -> str:
    """Say why a request that had caught up got no draft; after the step's commit."""
    request = entry.request
    if not request.drafting:
        return "drafter_failed"
    if request.params.max_draft == 0:
        return "not_wanted"
    if entry.max_draft == 0:
        return "at_its_end" if request.num_remaining <= 0 else "no_room"
    return "no_guess"
