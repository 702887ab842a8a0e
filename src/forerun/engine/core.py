"""The step: plan, draft, verify, accept, commit. One thread calls it; nothing here waits.

plan      = scheduler.schedule()      which requests, how many tokens each
proposal  = drafter.propose(...)      guesses for those that have caught up
logits    = runner.forward(...)       one pass of the target over all of it
decisions = decide(...)               an exact rule says which guesses stay, what comes next
events    = commit                    append up to a stop, truncate, free
drafter.observe(...)                  the drafter hears what became of its guesses
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..draft.base import Drafter
from ..errors import CapacityError, ForerunError, InvalidLogits, NoTokenPossible
from ..sampling import Chooser, choose_by_drafts
from ..types import FinishReason, RequestOutcome, TokenEvent
from .batch import build_batch
from .guard import GuardedDrafter
from .request import Request
from .runner import TargetRunner
from .scheduler import Plan, PlanEntry, Scheduler
from .verify import Decision, Fault, decide, score_prompts

__all__ = ["EngineCore"]

logger = logging.getLogger(__name__)


class EngineCore:
    """Requests in, events out, one step at a time."""

    def __init__(
        self,
        runner: TargetRunner,
        scheduler: Scheduler,
        drafter: Drafter,
        choose: Chooser = choose_by_drafts,
    ) -> None:
        self._runner = runner
        self._choose = choose
        self._scheduler = scheduler
        self._drafter = GuardedDrafter(drafter, runner.vocab_size, runner.row_cost)

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.num_running or self._scheduler.num_waiting)

    def add(self, request: Request) -> None:
        """Take a request in; it joins at the next step."""
        self._drafter.start(request)
        self._scheduler.add(request)

    def cancel(self, request_id: int) -> TokenEvent | None:
        """End a request between two steps and free what it holds; None if it had ended."""
        request = self._scheduler.find(request_id)
        if request is None:
            return None
        self._scheduler.end(request, FinishReason.CANCELLED)
        self._drafter.finish(request_id)
        text = request.detokenizer.finish()
        return TokenEvent(request_id, (), text, 0, FinishReason.CANCELLED)

    def step(self) -> list[TokenEvent]:
        """Do one pass and say what each request got from it."""
        begin_s = time.perf_counter()
        plan = self._scheduler.schedule(begin_s)
        self._runner.scrub(self._scheduler.take_suspects())
        if not plan.entries:
            return []
        scheduled_s = time.perf_counter()
        wanted = [(each.request, each.max_draft) for each in plan.sampling]
        proposal = self._drafter.propose(wanted)
        drafted_s = time.perf_counter()
        try:
            batch = build_batch(plan, proposal, self._runner.device)
            logits, features = self._runner.forward(batch)
            num_rows = len(plan.sampling) + int(proposal.lengths.sum())
            score_prompts(plan.entries, logits[num_rows:])
            decisions = decide(plan, proposal, logits[:num_rows], self._choose)
        except Exception as error:  # noqa: BLE001  (whatever it is, others must go on)
            return self._fail_step(plan, error)
        verified_s = time.perf_counter()
        events, heard = self._commit(plan, decisions, verified_s)
        self._drafter.observe(heard, features)
        self._finish(events)
        end_s = time.perf_counter()
        for entry in plan.entries:
            entry.request.counters.count_time(
                draft_s=drafted_s - scheduled_s,
                verify_s=verified_s - drafted_s,
                host_s=scheduled_s - begin_s + end_s - verified_s,
            )
        return events

    def check_integrity(self) -> None:
        """Assert what must hold between steps; for tests and for idle moments."""
        self._scheduler.check_integrity()
        self._drafter.check_integrity({each.request_id for each in self._scheduler.unfinished()})

    def _commit(
        self, plan: Plan, decisions: Sequence[Decision], now_s: float
    ) -> tuple[list[TokenEvent], list[RequestOutcome]]:
        for entry in plan.entries:
            if not entry.samples:
                self._scheduler.commit(entry, (), now_s, None)
        events, heard = [], []
        for entry, decision in zip(plan.sampling, decisions, strict=True):
            request, num_drafted = entry.request, decision.num_drafted
            if decision.fault is Fault.INVALID_LOGITS and num_drafted:
                # A draft's own NaN reaches the rows beside it; the plain pass never meets it.
                self._scheduler.retry_plainly(entry)
                request.counters.count_fault("nan_in_draft")
                continue
            if decision.fault is not None:
                events.append(self._fail(request, _explain(entry, decision.fault)))
                continue
            block = _cut_at_stop(request, decision.candidates)
            emitted = decision.candidates[: block.num_emitted]
            kept = min(decision.num_accepted, len(emitted))
            request.counters.count_step(num_drafted, kept, len(emitted))
            self._scheduler.commit(entry, emitted, now_s, block.finish_reason)
            said = None if decision.logprobs is None else decision.logprobs[: len(emitted)]
            events.append(
                TokenEvent(
                    request.request_id,
                    emitted,
                    block.text,
                    kept,
                    block.finish_reason,
                    logprobs=said,
                )
            )
            finished = block.finish_reason is not None
            heard.append(RequestOutcome(request.request_id, num_drafted, kept, emitted, finished))
        return events, heard

    def _finish(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None:
                self._drafter.finish(event.request_id)

    def _fail(self, request: Request, error: ForerunError) -> TokenEvent:
        self._scheduler.end(request, FinishReason.ERROR)
        text = request.detokenizer.finish()
        return TokenEvent(request.request_id, (), text, 0, FinishReason.ERROR, error)

    def _fail_step(self, plan: Plan, error: Exception) -> list[TokenEvent]:
        """End the requests of a pass that could not be done; the others go on."""
        logger.error("a pass over %d requests failed", len(plan.entries), exc_info=error)
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            wrapped: ForerunError = CapacityError(
                "a pass ran out of memory; lower max_num_batched_tokens, max_num_seqs or "
                "kv_cache_tokens"
            )
        else:
            wrapped = ForerunError(f"a pass failed: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        events = [self._fail(entry.request, wrapped) for entry in plan.entries]
        self._finish(events)
        return events


@dataclass(frozen=True, slots=True)
class _Block:
    num_emitted: int
    text: str
    finish_reason: FinishReason | None


def _cut_at_stop(request: Request, candidates: Sequence[int]) -> _Block:
    """Go through a block token by token, and end it exactly where the request ends.

    A stop token is emitted but has no text; a stop string's text is cut before it.
    """
    detokenizer = request.detokenizer
    text: list[str] = []
    if request.num_remaining == 0:  # only the prompt was asked about
        return _Block(0, detokenizer.finish(), FinishReason.LENGTH)
    for index, token in enumerate(candidates):
        count = index + 1
        if token in request.stop_ids:
            return _Block(count, "".join([*text, detokenizer.finish()]), FinishReason.STOP)
        text.append(detokenizer.push(token))
        if detokenizer.stopped is not None:
            return _Block(count, "".join(text), FinishReason.STOP)
        if count == request.num_remaining:
            text.append(detokenizer.finish())
            return _Block(count, "".join(text), FinishReason.LENGTH)
    return _Block(len(candidates), "".join(text), None)


def _explain(entry: PlanEntry, fault: Fault) -> ForerunError:
    request = entry.request
    place = (
        f"at position {len(request.tokens)} (step {request.counters.num_steps + 1}) of request "
        f"{request.request_id}"
    )
    if fault is Fault.INVALID_LOGITS:
        return InvalidLogits(
            f"the model gave NaN or infinite logits {place}; check the weights, or try "
            "dtype='float32'"
        )
    return NoTokenPossible(
        f"no token is possible {place}: allowed_token_ids, banned_token_ids, bad_words and "
        "min_tokens leave none; loosen one of them"
    )
