"""Who owns which cache block: allocation, reference counts and prefix hashes. No tensors here.

A block holds `block_size` consecutive positions of one request. A full block whose positions
are all committed and proven finite may be *published* under a hash of every token up to its end; a
later request with the same beginning takes it over instead of computing it. Draft positions are
never published: a block is hashed only after commit.

    state of a block          reference count    found by hash
    free, empty                      0                no
    free, cached                     0                yes: can be revived, or evicted when needed
    owned                           >= 1              if published
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["BlockPool", "hash_block"]


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash a full block together with everything before it.

    128 bits of a cryptographic hash rather than Python's `hash`: two prompts that met would read
    each other's cache, and nobody must be able to construct such a pair.
    """
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """A fixed number of blocks, the free ones in the order in which they are evicted."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_owners = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns; cached ones count, since they can be evicted."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that a later request could find by hash, owned or not."""
        return len(self._published)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks for one owner, evicting the longest unused; None if too few."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._num_owners[block] = 1
        return blocks

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """List the published blocks for the longest run of `hashes` from the start."""
        blocks = []
        for digest in hashes:
            block = self._published.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner to published blocks that `find_prefix` returned."""
        for block in blocks:
            assert self._hashes[block] is not None, f"block {block} was never published"
            self._num_owners[block] += 1
            self._free.pop(block, None)

    def publish(self, block: int, digest: bytes) -> None:
        """Let others find an owned, full, committed block. Of equals the first stays."""
        assert self._num_owners[block] > 0, f"block {block} has no owner"
        if self._hashes[block] is None and digest not in self._published:
            self._hashes[block] = digest
            self._published[digest] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one ownership of each block. The last of a request are evicted first."""
        for block in reversed(blocks):
            assert self._num_owners[block] > 0, f"block {block} was released twice"
            self._num_owners[block] -= 1
            if self._num_owners[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that reference counts are exactly what the given owners' tables add up to."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
        assert expected == self._num_owners, "reference counts differ from the owners' tables"
        free = {block for block, owners in enumerate(self._num_owners) if owners == 0}
        assert free == set(self._free), "the free list differs from the blocks without owners"
        for digest, block in self._published.items():
            assert self._hashes[block] == digest, f"block {block} is published under another hash"

    def _forget(self, block: int) -> None:
        digest = self._hashes[block]
        if digest is not None:
            del self._published[digest]
            self._hashes[block] = None
