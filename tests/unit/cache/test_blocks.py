"""The block pool against a naive model, under random operations; and its rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forerun.cache.blocks import BlockPool, hash_block

NUM_BLOCKS, SIZE = 7, 4


def digest(number: int) -> bytes:
    return hash_block(b"", [number] * SIZE)


class PoolMachine(RuleBasedStateMachine):
    """Owners with tables; the model is counts, a dict of hashes, and a list in eviction order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.tables: list[list[int]] = []
        self.hashes: dict[int, bytes] = {}
        self.free = list(range(NUM_BLOCKS))  # the next to be taken comes first

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if count > len(self.free):
            assert blocks is None
            return
        assert blocks == self.free[:count]
        del self.free[:count]
        for block in blocks:
            self.hashes.pop(block, None)
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), number=st.integers(0, 4))
    def publish(self, data: st.DataObject, number: int) -> None:
        owned = sorted({block for table in self.tables for block in table})
        block = data.draw(st.sampled_from(owned))
        self.pool.publish(block, digest(number))
        if block not in self.hashes and digest(number) not in self.hashes.values():
            self.hashes[block] = digest(number)

    @rule(numbers=st.lists(st.integers(0, 4), max_size=4, unique=True))
    def find_and_share(self, numbers: list[int]) -> None:
        holders = {each: block for block, each in self.hashes.items()}
        expected = []
        for number in numbers:
            if digest(number) not in holders:
                break
            expected.append(holders[digest(number)])
        found = self.pool.find_prefix(digest(number) for number in numbers)
        assert found == expected
        self.pool.share(found)
        self.free = [block for block in self.free if block not in found]
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for block in reversed(table):
            if not any(block in other for other in self.tables):
                place = len(self.free) if block in self.hashes else 0
                self.free.insert(place, block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity(self.tables)
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_cached == len(self.hashes)
        for block, held in self.hashes.items():
            assert self.pool.find_prefix([held]) == [block]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def make_pool(num_published: int = 0) -> tuple[BlockPool, list[int]]:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(4)
    assert blocks is not None
    for number in range(num_published):
        pool.publish(blocks[number], digest(number))
    return pool, blocks


def test_a_failed_allocation_takes_nothing():
    pool = BlockPool(3, SIZE)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []


def test_unpublished_blocks_go_before_cached_ones_and_tails_before_heads():
    pool, blocks = make_pool(num_published=3)
    pool.release(blocks)
    order = [pool.allocate(1) for _ in range(4)]
    # Block 3 holds nothing to keep; then the prefix is eaten from its end, so its start stays.
    assert order == [[blocks[3]], [blocks[2]], [blocks[1]], [blocks[0]]]


def test_the_longest_unused_prefix_is_evicted_first():
    pool = BlockPool(4, SIZE)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None
    assert second is not None
    for number, block in enumerate([*first, *second]):
        pool.publish(block, digest(number))
    pool.release(second)
    pool.release(first)
    pool.share([second[0]])  # used again: now it is the youngest
    pool.release([second[0]])
    taken = [pool.allocate(1) for _ in range(4)]
    assert taken == [[second[1]], [first[1]], [first[0]], [second[0]]]


def test_a_cached_block_is_revived_and_shared():
    pool, blocks = make_pool(num_published=2)
    pool.release(blocks)
    found = pool.find_prefix([digest(0), digest(1), digest(2)])
    assert found == blocks[:2]
    pool.share(found)
    pool.share(found)
    pool.check_integrity([found, found])
    assert pool.num_free == 2
    pool.release(found)
    pool.check_integrity([found])
    assert pool.num_free == 2


def test_a_run_of_hashes_ends_at_the_first_gap():
    pool, blocks = make_pool(num_published=3)
    assert pool.find_prefix([digest(0), digest(9), digest(2)]) == [blocks[0]]
    assert pool.find_prefix([digest(9), digest(2)]) == []


def test_eviction_makes_a_block_impossible_to_find():
    pool, blocks = make_pool(num_published=4)
    pool.release(blocks)
    assert pool.num_cached == 4
    assert pool.allocate(4) is not None
    assert pool.num_cached == 0
    assert pool.find_prefix([digest(0)]) == []


def test_the_first_of_equal_blocks_is_the_one_found():
    pool, blocks = make_pool(num_published=1)
    pool.publish(blocks[1], digest(0))
    assert pool.find_prefix([digest(0)]) == [blocks[0]]
    pool.publish(blocks[0], digest(5))  # a block's hash never changes
    assert pool.find_prefix([digest(5)]) == []


def test_misuse_is_caught():
    pool, blocks = make_pool()
    with pytest.raises(AssertionError, match="never published"):
        pool.share([blocks[0]])
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([blocks[0]])
    with pytest.raises(AssertionError, match="no owner"):
        pool.publish(blocks[0], digest(0))
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([[blocks[0]]])


def test_integrity_sees_leaks_and_thefts():
    pool, blocks = make_pool()
    pool.check_integrity([blocks])
    for tables in ([], [blocks[:3]], [blocks, blocks[:1]]):
        with pytest.raises(AssertionError, match="reference counts"):
            pool.check_integrity(tables)


def test_hashes_tell_tokens_order_and_parents_apart():
    parent = hash_block(b"", [1, 2, 3, 4])
    seen = {
        parent,
        hash_block(b"", [1, 2, 4, 3]),
        hash_block(b"", [1, 2, 3, 4 + 2**32]),
        hash_block(parent, [1, 2, 3, 4]),
        hash_block(hash_block(parent, [1, 2, 3, 4]), [1, 2, 3, 4]),
        hash_block(hash_block(b"", [9, 2, 3, 4]), [1, 2, 3, 4]),
    }
    assert len(seen) == 6
    assert all(len(each) == 16 for each in seen)
    assert hash_block(parent, (5, 6, 7, 8)) == hash_block(parent, [5, 6, 7, 8])
