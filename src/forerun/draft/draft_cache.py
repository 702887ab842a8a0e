"""What a draft model has computed of each request: whose positions are valid, in which blocks.

tokens   [0, num_shared * size)      in blocks that others may read too: never written again
         [.., num_proven)            finite for sure: logits that saw them were
         [.., len(tokens))           computed, not yet seen by any logits
blocks   [len(tokens), blocks' end)  ours alone: dropped drafts or not yet written, and finite

One rule keeps it right: what is computed is compared with what the request has become, and valid as
far as the two agree. Rejected drafts, changed text and steps that were undone are all this rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ..cache.blocks import BlockPool, hash_block

__all__ = ["DraftCache"]


@dataclass(slots=True, eq=False)
class _Held:
    """One request's part of the cache."""

    salt: bytes
    tokens: list[int] = field(default_factory=list)  # whose keys and values are computed
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of full blocks of tokens, as far as known
    num_shared: int = 0  # blocks that were published or taken over
    num_proven: int = 0
    last_turn: int = 0  # when it was last asked for


class DraftCache:
    """Who owns which block of a draft model's cache, and what lies in it. No tensors here."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        scrub: Callable[[int, int], None],
        *,
        share_prefixes: bool = True,
    ) -> None:
        """`scrub(block, offset)` zeroes a block from an offset on."""
        self._pool = BlockPool(num_blocks, block_size)
        self._share_prefixes = share_prefixes
        self._scrub_block = scrub
        self._held: dict[int, _Held] = {}
        self._turn = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that no request owns."""
        return self._pool.num_free

    def start(self, request_id: int, salt: str) -> None:
        """Notice a request. Whoever has another salt shares nothing with it."""
        self._held[request_id] = _Held(salt.encode())

    def finish(self, request_id: int) -> None:
        """Forget a request; its blocks are free, and found by hash until others need them."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._give_up(held)

    def drop(self, request_id: int, *, suspect: bool = False) -> None:
        """Free what is held of a request; `suspect`: what no logits have proven may be NaN."""
        held = self._held[request_id]
        if suspect:
            self._scrub(held, held.num_proven)
        self._give_up(held)

    def align(self, request_id: int, tokens: Sequence[int], first_changed: int) -> int:
        """Keep what is computed of `tokens`, at most all but the last, and say how many they are.

        Before `first_changed` they are what they were at the last call. The last one is always
        computed anew: its logits say what comes next.
        """
        held = self._held[request_id]
        self._turn += 1
        held.last_turn = self._turn
        if not held.blocks:
            self._take_prefix(held, tokens)
        most = min(len(held.tokens), len(tokens) - 1)
        same = min(first_changed, most)
        while same < most and held.tokens[same] == tokens[same]:
            same += 1
        self._truncate(held, same)
        return len(held.tokens)

    def reserve(self, request_id: int, num_positions: int, keep: AbstractSet[int]) -> bool:
        """Have blocks for so many positions; False: there are too few.

        Requests that are not among `keep` give theirs up for it, the longest not asked for first.
        """
        held = self._held[request_id]
        missing = -(-num_positions // self._pool.block_size) - len(held.blocks)
        if missing <= 0:
            return True
        if missing > self._pool.num_free:
            self._evict(missing, keep)
        blocks = self._pool.allocate(missing)
        if blocks is None:
            return False
        held.blocks.extend(blocks)
        return True

    def blocks(self, request_id: int) -> Sequence[int]:
        """List a request's blocks, in order."""
        return self._held[request_id].blocks

    def num_computed(self, request_id: int) -> int:
        """Count the positions whose keys and values are there."""
        return len(self._held[request_id].tokens)

    def append(self, request_id: int, tokens: Sequence[int]) -> None:
        """Note that the next positions were computed, of these tokens."""
        self._held[request_id].tokens.extend(tokens)

    def prove(self, request_id: int, num_tokens: int) -> None:
        """Note that logits which saw all that is computed were finite; the first so many may be
        shared, but for the last of them, which is computed again.
        """
        held = self._held[request_id]
        held.num_proven = len(held.tokens)
        num_full = (min(num_tokens, len(held.tokens)) - 1) // self._pool.block_size
        for index in range(held.num_shared, num_full):
            self._pool.publish(held.blocks[index], self._hash(held, index, held.tokens))
            held.num_shared = index + 1

    def check_integrity(self) -> None:
        """Assert that blocks are owned exactly by the requests that are known."""
        self._pool.check_integrity(held.blocks for held in self._held.values())
        size = self._pool.block_size
        for held in self._held.values():
            assert held.num_shared * size <= held.num_proven <= len(held.tokens)
            assert len(held.tokens) <= len(held.blocks) * size

    def _take_prefix(self, held: _Held, tokens: Sequence[int]) -> None:
        """Take over the computed blocks of an equal beginning."""
        size = self._pool.block_size
        del held.hashes[:]
        if not self._share_prefixes:
            return
        hashes = (self._hash(held, index, tokens) for index in range((len(tokens) - 1) // size))
        held.blocks = self._pool.find_prefix(hashes)
        self._pool.share(held.blocks)
        held.num_shared = len(held.blocks)
        held.tokens = list(tokens[: held.num_shared * size])
        held.num_proven = len(held.tokens)

    def _hash(self, held: _Held, index: int, tokens: Sequence[int]) -> bytes:
        size = self._pool.block_size
        if index == len(held.hashes):
            parent = held.hashes[-1] if held.hashes else held.salt
            held.hashes.append(hash_block(parent, tokens[index * size : (index + 1) * size]))
        return held.hashes[index]

    def _truncate(self, held: _Held, length: int) -> None:
        size = self._pool.block_size
        if held.num_proven < len(held.tokens):
            self._scrub(held, max(length, held.num_proven))
        if length < held.num_shared * size:
            # Others may read the block in which it ends: computed again elsewhere, not changed.
            held.num_shared = length // size
            length = held.num_shared * size
            self._pool.release(held.blocks[held.num_shared :])
            del held.blocks[held.num_shared :]
        del held.tokens[length:]
        del held.hashes[length // size :]
        held.num_proven = min(held.num_proven, length)

    def _evict(self, missing: int, keep: AbstractSet[int]) -> None:
        idle = [held for key, held in self._held.items() if key not in keep and held.blocks]
        idle.sort(key=lambda held: held.last_turn)
        for held in idle:
            if self._pool.num_free >= missing:
                return
            self._give_up(held)

    def _give_up(self, held: _Held) -> None:
        if held.num_proven < len(held.tokens):
            self._scrub(held, held.num_proven)
        self._pool.release(held.blocks)
        held.blocks, held.tokens, held.hashes = [], [], []
        held.num_shared = held.num_proven = 0

    def _scrub(self, held: _Held, position: int) -> None:
        """Zero what may be NaN from a position on, before others read it."""
        size = self._pool.block_size
        for index in range(position // size, len(held.blocks)):
            self._scrub_block(held.blocks[index], max(0, position - index * size))
