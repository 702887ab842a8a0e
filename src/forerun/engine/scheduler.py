"""Which requests step, with how many tokens each, and what becomes of the result.

There is no prefill phase and no decode phase: a request has tokens and a number of computed
positions, and a step lets it catch up, in pieces if need be; one that has caught up may run
ahead by a draft. When the cache is full the youngest request gives up its blocks and computes
them again later. Drafts never push anybody out. Whoever has the lower `priority` number is
admitted first and gives way last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..cache.blocks import BlockPool
from ..types import FinishReason
from .request import Request

__all__ = ["Plan", "PlanEntry", "Scheduler"]


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One request's part of a step: tokens [start, start + num_tokens), then up to max_draft."""

    request: Request
    start: int
    num_tokens: int
    max_draft: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the request's last token, so that its logits say the next."""
        return self.start + self.num_tokens == len(self.request.tokens)

    @property
    def is_bulk(self) -> bool:
        """Whether its rows are a prompt's, to be computed in big pieces (model/bits)."""
        return self.request.num_bulk is not None and self.start < self.request.num_bulk

    @property
    def scored(self) -> range:
        """The positions whose logits say how likely the prompt's next token was, if asked for."""
        request = self.request
        if not request.scores_prompt:
            return range(0)
        # A request that was preempted computes positions again that it has scored already.
        first = max(self.start, len(request.prompt_logprobs))
        return range(first, min(self.start + self.num_tokens, request.num_prompt - 1))


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coming step computes."""

    entries: tuple[PlanEntry, ...]

    @property
    def sampling(self) -> tuple[PlanEntry, ...]:
        return tuple(entry for entry in self.entries if entry.samples)


class Scheduler:
    """Owns the requests and their blocks."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        max_draft: int,
        share_prefixes: bool,
        max_fine_rows: int | None = None,  # rows of a small piece, where bits count (model/bits)
    ) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._max_model_len = max_model_len
        self._max_draft = max_draft
        self._share_prefixes = share_prefixes
        self._max_fine_rows = max_fine_rows
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # oldest first
        self._suspect: list[tuple[int, int]] = []  # (block, from offset) where NaN may lie
        self.num_preemptions = 0  # ever

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    @property
    def num_blocks_used(self) -> int:
        """Cache blocks that requests own."""
        return self._pool.num_blocks - self._pool.num_free

    def add(self, request: Request) -> None:
        """Queue a request. It starts at the next step that has room for it."""
        if self._max_fine_rows is not None:
            # A function of the prompt alone: neither company nor pieces may change a row's kind.
            is_long = request.num_prompt > self._max_fine_rows
            request.num_bulk = request.num_prompt if is_long else 0
        self._waiting.append(request)

    def find(self, request_id: int) -> Request | None:
        """Find an unfinished request."""
        every = (*self._running, *self._waiting)
        return next((each for each in every if each.request_id == request_id), None)

    def unfinished(self) -> list[Request]:
        """List all requests that have not ended, running ones first."""
        return [*self._running, *self._waiting]

    def schedule(self, now_s: float) -> Plan:
        """Choose the coming step's tokens and make room in the cache for them."""
        planned: dict[int, int] = {}  # request id -> tokens to catch up on
        # Those who only need one token come first: a long prompt must not stop the others.
        decoding = [each for each in self._running if each.num_pending == 1]
        catching_up = [each for each in self._running if each.num_pending > 1]
        budget = self._token_budget - self._plan_running(decoding, self._token_budget, planned)
        # Nor does it stop their drafts, which may take a quarter of a step.
        reserve = min(len(decoding) * self._max_draft, budget // 4)
        budget -= self._plan_running(catching_up, budget - reserve, planned)
        if len(self._running) == len(decoding) + len(catching_up):
            # Else somebody was just preempted, and would only come back to be preempted again.
            budget -= self._admit(planned, budget - reserve, now_s)
        return Plan(tuple(self._with_drafts(planned, budget)))

    def _plan_running(self, requests: list[Request], budget: int, planned: dict[int, int]) -> int:
        """Plan running requests within a budget: tokens of it that they take."""
        used = 0
        for request in requests:
            count = min(_num_of_a_kind(request, request.num_computed), budget - used)
            # One may have been preempted to make room for an earlier one.
            if count and request in self._running and self._make_room(request, count, planned):
                planned[request.request_id] = count
                used += count
        return used

    def commit(
        self, entry: PlanEntry, emitted: Sequence[int], now_s: float, finish: FinishReason | None
    ) -> None:
        """Append what a step gave a request, keep the valid part of its cache, free the rest.

        `emitted` holds the accepted draft tokens and the target's own, cut at a stop; it is
        empty for a request that is still catching up.
        """
        request = entry.request
        request.append(emitted)
        # Accepted drafts were computed in this step; the target's own token was not.
        own = 1 if emitted else 0
        request.num_computed = entry.start + entry.num_tokens + len(emitted) - own
        if emitted:
            # Every logits row was finite, and NaN anywhere before it would have reached it.
            request.num_proven = request.num_computed
            request.last_token_s = now_s
            if request.first_token_s is None:
                request.first_token_s = now_s
        self._publish(request)
        if finish is not None:
            self.end(request, finish)
            return
        self._release_beyond(request, request.num_computed)

    def retry_plainly(self, entry: PlanEntry) -> None:
        """Undo a step for one request: nothing of it counts, and it drafts no more."""
        request = entry.request
        request.num_computed = entry.start
        request.drafting = False
        self._suspect_from(request, entry.start)
        self._release_beyond(request, entry.start)

    def end(self, request: Request, reason: FinishReason) -> None:
        """Take a request out, whatever state it is in, and free its blocks."""
        request.finish_reason = reason
        if request in self._running:
            self._running.remove(request)
            self._give_up_blocks(request)
        else:
            self._waiting.remove(request)

    def take_suspects(self) -> list[tuple[int, int]]:
        """Hand over the (block, from offset) places to zero before the next pass reads them."""
        suspects, self._suspect = self._suspect, []
        return suspects

    def check_integrity(self) -> None:
        """Assert that blocks are owned exactly by running requests, and cover what is computed."""
        self._pool.check_integrity(request.blocks for request in self.unfinished())
        for request in self._waiting:
            assert not request.blocks, f"request {request.request_id} holds blocks while it waits"
        for request in self._running:
            assert request.num_pending >= 1, f"request {request.request_id} has nothing to compute"
            needed = self._blocks_for(request.num_computed)
            assert len(request.blocks) == needed, (
                f"request {request.request_id} has {len(request.blocks)} blocks for "
                f"{request.num_computed} computed positions; {needed} hold them"
            )

    def _with_drafts(self, planned: dict[int, int], budget: int) -> list[PlanEntry]:
        """Complete the plan: whoever catches up may draft, as far as budget and blocks go."""
        requests = [each for each in self._running if each.request_id in planned]
        requests.sort(key=_starts_in_bulk)
        budget = min(budget, self._room_in_piece(requests, planned))
        entries = []
        for index, request in enumerate(requests):
            count = planned[request.request_id]
            max_draft = 0
            catches_up = request.num_computed + count == len(request.tokens)
            if catches_up and not _starts_in_bulk(request):
                share = budget // (len(requests) - index)
                max_draft = self._room_to_draft(request, min(share, self._max_draft))
                budget -= max_draft
            entries.append(PlanEntry(request, request.num_computed, count, max_draft))
        return entries

    def _room_in_piece(self, requests: Sequence[Request], planned: dict[int, int]) -> int:
        """Count the rows that drafts may fill without another small piece, which costs a pass."""
        if self._max_fine_rows is None:
            return self._token_budget
        num_fine = sum(planned[each.request_id] for each in requests if not _starts_in_bulk(each))
        return -num_fine % self._max_fine_rows

    def _room_to_draft(self, request: Request, wish: int) -> int:
        """Cut a draft length to what can still be used, and allocate blocks that are to spare."""
        length = len(request.tokens)
        if request.params.max_draft is not None:
            wish = min(wish, request.params.max_draft)
        usable = min(wish, request.num_remaining - 1, self._max_model_len - length - 1)
        if not request.drafting or usable <= 0:
            return 0
        while usable > 0:
            missing = self._blocks_for(length + usable) - len(request.blocks)
            if missing <= self._pool.num_free:
                blocks = self._pool.allocate(max(0, missing))
                if blocks is None:
                    return 0
                request.blocks.extend(blocks)
                return usable
            usable = (len(request.blocks) + self._pool.num_free) * self._pool.block_size - length
        return 0

    def _make_room(self, request: Request, count: int, planned: dict[int, int]) -> bool:
        """Allocate blocks for `count` more positions, preempting the youngest while needed."""
        while True:
            missing = self._blocks_for(request.num_computed + count) - len(request.blocks)
            blocks = self._pool.allocate(max(0, missing))
            if blocks is not None:
                request.blocks.extend(blocks)
                return True
            # Not one that this step already counts on, unless nobody else is left.
            spare = [each for each in self._running if each.request_id not in planned]
            victim = max(reversed(spare), key=lambda each: each.params.priority)
            self._preempt(victim)
            if victim is request:
                return False

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._give_up_blocks(request)
        request.num_computed = 0
        request.num_proven = 0
        request.num_published = 0
        request.counters.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _admit(self, planned: dict[int, int], budget: int, now_s: float) -> int:
        """Start waiting requests while there is room: tokens of the budget that they take."""
        used = 0
        while self._waiting and len(self._running) < self._max_num_seqs and used < budget:
            # Of equals the first: `min` keeps their order.
            request = min(self._waiting, key=lambda each: each.params.priority)
            shared = self._find_prefix(request)
            self._pool.share(shared)
            computed = len(shared) * self._pool.block_size
            count = min(_num_of_a_kind(request, computed), budget - used)
            blocks = self._pool.allocate(self._blocks_for(computed + count) - len(shared))
            if blocks is None:
                self._pool.release(shared)
                break
            self._waiting.remove(request)
            self._running.append(request)
            request.blocks = [*shared, *blocks]
            request.num_computed = computed
            request.num_proven = computed
            request.num_published = len(shared)
            if request.scheduled_s is None:
                request.scheduled_s = now_s
                request.counters.num_cached_tokens = computed
            planned[request.request_id] = count
            used += count
        return used

    def _find_prefix(self, request: Request) -> list[int]:
        """Find computed blocks with the same beginning; the last token is always computed anew."""
        if not self._share_prefixes or request.scores_prompt:  # which needs the prompt's logits
            return []
        size = self._pool.block_size
        return self._pool.find_prefix(request.block_hashes(size, (len(request.tokens) - 1) // size))

    def _publish(self, request: Request) -> None:
        if not self._share_prefixes:
            return
        num_full = request.num_proven // self._pool.block_size
        hashes = request.block_hashes(self._pool.block_size, num_full)
        for index in range(request.num_published, num_full):
            self._pool.publish(request.blocks[index], hashes[index])
        request.num_published = num_full

    def _give_up_blocks(self, request: Request) -> None:
        # Positions that no logits have seen may hold NaN, which their next owner must not meet.
        if request.num_proven < request.num_computed or request.finish_reason is FinishReason.ERROR:
            self._suspect_from(request, request.num_proven)
        self._pool.release(request.blocks)
        request.blocks = []

    def _suspect_from(self, request: Request, position: int) -> None:
        """Note what a request wrote from `position` on; blocks from there are its own alone."""
        size = self._pool.block_size
        for index in range(position // size, len(request.blocks)):
            offset = max(0, position - index * size)
            self._suspect.append((request.blocks[index], offset))

    def _release_beyond(self, request: Request, num_positions: int) -> None:
        needed = self._blocks_for(num_positions)
        self._pool.release(request.blocks[needed:])
        del request.blocks[needed:]

    def _blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self._pool.block_size)


def _starts_in_bulk(request: Request) -> bool:
    return request.num_bulk is not None and request.num_computed < request.num_bulk


def _num_of_a_kind(request: Request, start: int) -> int:
    """Count the pending tokens from `start` on that may be computed together."""
    if request.num_bulk is not None and start < request.num_bulk:
        return request.num_bulk - start
    return len(request.tokens) - start
