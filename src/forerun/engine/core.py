"""The step: plan, draft, verify, accept, commit. One thread calls it; nothing here waits.

plan      = scheduler.schedule()      which requests, how many tokens each
guesses   = drafter.propose(...)      drafts for those that have caught up
logits    = runner.forward(...)       one pass of the target over all of it
decisions = decide(...)               an exact rule says which guesses stay, what comes next
events    = commit                    append up to a stop, truncate, free
drafter.observe(...)                  the drafter hears what became of its guesses
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..draft.base import Drafter
from ..errors import CapacityError, ForerunError, InvalidLogits, NoTokenPossible
from ..sampling import Chooser, choose_by_drafts
from ..types import FinishReason, RequestOutcome, TokenEvent
from .batch import build_batch
from .features import Path, gather_features
from .guard import GuardedDrafter, Guesses
from .report import num_prompt_tokens, plain_seconds, sampled_rows
from .request import Request
from .runner import Runner
from .scheduler import Plan, PlanEntry, Scheduler
from .stats import SampledRow, StepReport
from .stops import cut_at_stop
from .verify import Decision, Fault, decide, score_prompts

__all__ = ["EngineCore", "StepObserver"]

# Hears of every step, in the engine's thread: must be quick, and must not raise.
StepObserver = Callable[[StepReport], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Committed:
    """What a step gave its requests."""

    events: list[TokenEvent]
    heard: list[RequestOutcome]
    paths: dict[int, Path]  # the accepted nodes of every request that goes on


class EngineCore:
    """Requests in, events out, one step at a time."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        drafter: Drafter,
        choose: Chooser = choose_by_drafts,
    ) -> None:
        self._runner = runner
        self._choose = choose
        self._scheduler = scheduler
        self._drafter = GuardedDrafter(drafter, runner.vocab_size, runner.row_cost, runner.pass_s)
        self.observers: list[StepObserver] = []
        self._num_preempted = 0  # as far as reported

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.num_running or self._scheduler.num_waiting)

    @property
    def load(self) -> tuple[int, int, int]:
        """Requests that run and that wait, and cache blocks in use; from any thread."""
        scheduler = self._scheduler
        return scheduler.num_running, scheduler.num_waiting, scheduler.num_blocks_used

    @property
    def method(self) -> str:
        """What the drafter is called where guesses are counted."""
        return self._drafter.method

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
        return TokenEvent(request_id, (), None, 0, FinishReason.CANCELLED)

    def step(self) -> list[TokenEvent]:
        """Do one pass and say what each request got from it."""
        begin_s = time.perf_counter()
        plan = self._scheduler.schedule(begin_s)
        self._runner.scrub(self._scheduler.take_suspects())
        if not plan.entries:
            return []
        scheduled_s = time.perf_counter()
        wanted = [(each.request, each.max_draft) for each in plan.sampling]
        guesses = self._drafter.propose(wanted)
        drafted_s = time.perf_counter()
        try:
            batch = build_batch(plan, guesses.proposal, self._runner.device)
            logits, states = self._runner.forward(batch, self._drafter.features)
            num_rows = batch.num_sampling_rows
            score_prompts(plan.entries, logits[num_rows:])
            decisions = decide(plan, guesses, logits[:num_rows], self._choose)
        except Exception as error:  # noqa: BLE001  (whatever it is, others must go on)
            return self._fail_step(plan, error)
        verified_s = time.perf_counter()
        sampling = plan.sampling  # before commit: it depends on how many tokens requests have
        committed = self._commit(plan, guesses, decisions, verified_s)
        events, heard = committed.events, committed.heard
        self._drafter.observe(heard, gather_features(states, batch, plan, committed.paths))
        self._finish(events)
        end_s = time.perf_counter()
        draft_s, verify_s = drafted_s - scheduled_s, verified_s - drafted_s
        host_s = scheduled_s - begin_s + end_s - verified_s
        for entry in plan.entries:
            entry.request.counters.count_time(draft_s, verify_s, host_s)
        if self.observers:
            sampled = sampled_rows(dict(zip(sampling, guesses.methods, strict=True)), heard)
            self._report(plan, sampled, len(batch.token_ids), (draft_s, verify_s, host_s))
        else:
            self._drafter.take_faults()  # counted by request; nobody else wants them
        return events

    def check_integrity(self) -> None:
        """Assert what must hold between steps; for tests and for idle moments."""
        self._scheduler.check_integrity()
        self._drafter.check_integrity({each.request_id for each in self._scheduler.unfinished()})

    def _commit(
        self, plan: Plan, guesses: Guesses, decisions: Sequence[Decision], now_s: float
    ) -> _Committed:
        paths: dict[int, Path] = {}
        for entry in plan.entries:
            if not entry.samples:
                self._scheduler.commit(entry, (), now_s, None)
                paths[entry.request.request_id] = ()
        events, heard = [], []
        for entry, method, decision in zip(plan.sampling, guesses.methods, decisions, strict=True):
            request, num_drafted = entry.request, decision.num_drafted
            if decision.fault is Fault.INVALID_LOGITS and num_drafted:
                # A draft's own NaN reaches the rows beside it; the plain pass never meets it.
                self._scheduler.retry_plainly(entry)
                request.counters.count_fault("nan_in_draft")
                continue
            if decision.fault is not None:
                events.append(self._fail(request, _explain(entry, decision.fault)))
                continue
            try:
                block = cut_at_stop(request, decision.candidates)
            except ForerunError as error:  # of its grammar
                events.append(self._fail(request, error))
                continue
            emitted = decision.candidates[: block.num_emitted]
            kept = min(decision.num_accepted, len(emitted))
            request.counters.count_step(num_drafted, kept, len(emitted), decision.draft_depth)
            path = tuple(range(1, kept + 1)) if decision.path is None else decision.path[:kept]
            self._straighten(request, path)
            self._scheduler.commit(entry, emitted, now_s, block.finish_reason)
            said = None if decision.logprobs is None else decision.logprobs[: len(emitted)]
            events.append(
                TokenEvent(
                    request.request_id,
                    emitted,
                    block.pieces,
                    kept,
                    block.finish_reason,
                    logprobs=said,
                    stopped_by=block.stopped_by,
                    method=method,
                )
            )
            finished = block.finish_reason is not None
            if not finished:
                paths[request.request_id] = path
            heard.append(
                RequestOutcome(
                    request_id=request.request_id,
                    num_drafted=num_drafted,
                    num_accepted=kept,
                    emitted=emitted,
                    finished=finished,
                    method=method,
                    draft_depth=None if decision.path is None else decision.draft_depth,
                )
            )
        return _Committed(events, heard, paths)

    def _straighten(self, request: Request, path: Path) -> None:
        """Move what the accepted nodes of a tree left in the cache to where a path's would lie."""
        moves = [(node - 1, depth) for depth, node in enumerate(path) if node - 1 != depth]
        if moves:
            size, length = self._scheduler.block_size, len(request.tokens)

            def slot(index: int) -> int:
                place = length + index
                return request.blocks[place // size] * size + place % size

            self._runner.move([slot(a) for a, _ in moves], [slot(b) for _, b in moves])

    def _report(
        self,
        plan: Plan,
        sampled: tuple[SampledRow, ...],
        num_rows: int,
        seconds: tuple[float, float, float],
    ) -> None:
        """Tell observers of a step that is over; `seconds` to draft, to verify, for the rest."""
        draft_s, verify_s, host_s = seconds
        num_preempted = self._scheduler.num_preemptions - self._num_preempted
        self._num_preempted += num_preempted
        report = StepReport(
            num_requests=len(plan.entries),
            num_rows=num_rows,
            num_prompt_tokens=num_prompt_tokens(plan),
            sampled=sampled,
            draft_s=draft_s,
            verify_s=verify_s,
            host_s=host_s,
            plain_s=plain_seconds(sampled, num_rows, verify_s + host_s, self._runner.row_cost),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_blocks_used=self._scheduler.num_blocks_used,
            num_blocks=self._scheduler.num_blocks,
            num_preempted=num_preempted,
            faults=self._drafter.take_faults(),
        )
        for observer in self.observers:
            try:
                observer(report)
            except Exception:
                logger.exception("an observer of the engine failed")

    def _finish(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None:
                self._drafter.finish(event.request_id)

    def _fail(self, request: Request, error: ForerunError) -> TokenEvent:
        self._scheduler.end(request, FinishReason.ERROR)
        return TokenEvent(request.request_id, (), None, 0, FinishReason.ERROR, error)

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
    if request.grammar_error is not None:
        return NoTokenPossible(f"the constraint cannot go on {place}: {request.grammar_error}")
    return NoTokenPossible(
        f"no token is possible {place}: allowed_token_ids, banned_token_ids, bad_words, "
        "min_tokens and the constraint leave none; loosen one of them"
    )
