"""A draft model's cache: what is valid, who owns it, what others may read, what may be NaN."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.draft.draft_cache import DraftCache

SIZE = 4


class Fake:
    """The tensors behind the blocks, as a dictionary: (block, offset) -> the tokens so far.

    A value depends on all tokens before, as keys and values do; "NaN" stands for itself.
    """

    def __init__(self, num_blocks: int, *, share_prefixes: bool = True) -> None:
        self.cells: dict[tuple[int, int], object] = {}
        self.cache = DraftCache(num_blocks, SIZE, self.scrub, share_prefixes=share_prefixes)

    def scrub(self, block: int, offset: int) -> None:
        for each in range(offset, SIZE):
            self.cells[block, each] = "zero"

    def read(self, key: int, count: int) -> list[object]:
        blocks = self.cache.blocks(key)
        return [self.cells.get((blocks[p // SIZE], p % SIZE)) for p in range(count)]

    def write(self, key: int, tokens: list[int], first: int, end: int, nan: bool = False) -> None:
        blocks = self.cache.blocks(key)
        for position in range(first, end):
            value = "NaN" if nan else tuple(tokens[: position + 1])
            self.cells[blocks[position // SIZE], position % SIZE] = value

    def compute(self, key: int, tokens: list[int], changed: int = 0, drafted: tuple = ()) -> int:
        """Catch up on tokens as the drafter does, and draft; how many were there already."""
        computed = self.cache.align(key, tokens, changed)
        whole = [*tokens, *drafted]
        assert self.cache.reserve(key, len(whole), {key})
        assert self.read(key, computed) == [tuple(tokens[: p + 1]) for p in range(computed)]
        self.write(key, whole, computed, len(whole))
        self.cache.append(key, whole[computed:])
        self.cache.prove(key, len(tokens))
        self.cache.check_integrity()
        return computed


def started(num_blocks: int = 16, **salts: str) -> Fake:
    fake = Fake(num_blocks)
    for key, salt in salts.items():
        fake.cache.start(int(key[1:]), salt)
    return fake


def test_the_last_token_is_always_computed_anew():
    fake = started(r1="")
    assert fake.compute(1, [1, 2, 3]) == 0
    assert fake.compute(1, [1, 2, 3], 3) == 2


def test_accepted_drafts_stay_and_rejected_ones_go():
    fake = started(r1="")
    fake.compute(1, [1, 2, 3], drafted=(4, 5, 6))
    assert fake.compute(1, [1, 2, 3, 4, 5, 9, 9], 3, drafted=(7,)) == 5
    assert fake.compute(1, [1, 2, 3, 4, 5, 9, 9, 8], 7) == 7


def test_nothing_is_taken_over_where_the_engine_shares_nothing():
    fake = Fake(16, share_prefixes=False)
    for key in (1, 2):
        fake.cache.start(key, "")
    tokens = list(range(10))
    fake.compute(1, tokens)
    assert fake.compute(2, tokens) == 0
    assert fake.compute(1, [*tokens, 10], 10) == 10


def test_an_equal_beginning_is_taken_over_and_never_written():
    fake = started(r1="", r2="", r3="other")
    tokens = list(range(10))
    fake.compute(1, tokens)
    assert fake.compute(2, tokens) == 8
    assert fake.compute(3, tokens) == 0
    shared = fake.cache.blocks(1)[:2]
    assert list(fake.cache.blocks(2)[:2]) == list(shared)
    assert not set(fake.cache.blocks(3)) & set(fake.cache.blocks(1))
    # Text that changes inside a shared block is computed elsewhere.
    other = [*tokens[:6], 77, 78, 79, 80]
    assert fake.compute(2, other, 6) == 4
    assert list(fake.cache.blocks(2)[:1]) == list(shared[:1])
    assert fake.cache.blocks(2)[1] != shared[1]
    assert fake.compute(1, [*tokens, 10], 10) == 10


def test_blocks_of_the_finished_are_found_until_they_are_needed():
    fake = started(4, r1="")
    fake.compute(1, list(range(9)))
    fake.cache.finish(1)
    assert fake.cache.num_free == 4
    fake.cache.start(2, "")
    assert fake.compute(2, list(range(9))) == 8
    fake.cache.finish(2)
    fake.cache.start(3, "")
    fake.compute(3, list(range(50, 66)))
    fake.cache.finish(3)
    fake.cache.start(4, "")
    assert fake.compute(4, list(range(9))) == 0


def test_drafts_are_never_shared():
    fake = started(r1="", r2="")
    fake.compute(1, [1, 2, 3], drafted=(4, 5, 6, 7, 8))
    assert fake.compute(2, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


def test_whoever_is_not_asked_for_gives_way_the_longest_ago_first():
    fake = started(4, r1="", r2="", r3="", r4="")
    for key in (1, 2, 3):
        fake.compute(key, [key, 0, 0])
    fake.compute(1, [1, 0, 0, 0], 3)
    fake.cache.align(4, list(range(20, 28)), 0)
    assert fake.cache.reserve(4, 8, {4})
    assert [len(fake.cache.blocks(key)) for key in (1, 2, 3)] == [1, 0, 1]
    assert not fake.cache.reserve(2, 8, {1, 2, 3, 4}), "nobody is idle"
    fake.cache.check_integrity()


def test_what_no_logits_have_proven_is_scrubbed_before_others_read_it():
    fake = started(2, r1="", r2="")
    fake.compute(1, [1, 2])
    tokens = [1, 2, 3, 4, 5]
    first = fake.cache.align(1, tokens, 2)
    assert fake.cache.reserve(1, 5, {1})
    fake.write(1, tokens, first, 5, nan=True)
    fake.cache.append(1, tokens[first:])
    fake.cache.finish(1)
    assert "NaN" not in fake.cells.values()


def test_a_pass_that_may_have_written_anything_is_scrubbed():
    fake = started(2, r1="")
    fake.compute(1, [1, 2])
    fake.cache.align(1, [1, 2, 3], 2)
    assert fake.cache.reserve(1, 6, {1})
    fake.write(1, [1, 2, 3, 4, 5, 6], 2, 6, nan=True)  # and then it raised
    fake.cache.drop(1, suspect=True)
    assert "NaN" not in fake.cells.values()
    assert fake.cache.num_free == 2


def test_unproven_text_that_changed_is_scrubbed():
    fake = started(4, r1="")
    tokens = [1, 2, 3, 4, 5, 6]
    fake.cache.align(1, tokens, 0)
    assert fake.cache.reserve(1, 6, {1})
    fake.write(1, tokens, 0, 6, nan=True)
    fake.cache.append(1, tokens)
    fake.cache.align(1, [1, 2, 7], 2)
    assert fake.read(1, 6)[2:] == ["zero"] * 4


def test_finishing_twice_or_the_unknown_is_nothing():
    fake = started(r1="")
    fake.cache.finish(1)
    fake.cache.finish(1)
    fake.cache.finish(9)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "change", "finish", "drop"]),
        st.integers(0, 3),
        st.lists(st.integers(0, 1), min_size=1, max_size=7),
        st.integers(0, 4),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_what_is_called_computed_is_what_was_written(steps):
    """Four requests of two tokens' text, which share much, in a cache that is mostly too small."""
    fake = started(9, **{f"r{key}": "" for key in range(4)})
    texts: dict[int, list[int]] = {key: [] for key in range(4)}
    for verb, key, fresh, number in steps:
        if verb == "finish":
            fake.cache.finish(key)
            fake.cache.start(key, "")
            texts[key] = []
        elif verb == "drop":
            fake.cache.drop(key)
        else:
            changed = len(texts[key]) if verb == "grow" else max(0, len(texts[key]) - number)
            texts[key] = [*texts[key][:changed], *fresh]
            if len(texts[key]) + number <= 9 * SIZE:
                fake.compute(key, texts[key], changed, tuple([1] * number))
            else:
                fake.cache.finish(key)
                fake.cache.start(key, "")
                texts[key] = []
        fake.cache.check_integrity()
    for key in range(4):
        fake.cache.finish(key)
    assert fake.cache.num_free == 9


def test_the_twin_sees_a_shared_block_that_is_written(monkeypatch):
    """Power: without the care for shared blocks the laws above do not hold."""
    fake = started(r1="", r2="")
    tokens = list(range(10))
    fake.compute(1, tokens)
    fake.compute(2, tokens)
    fake.cache._held[2].num_shared = 0
    fake.compute(2, [*tokens[:6], 77, 78, 79, 80], 6)
    with pytest.raises(AssertionError):
        fake.compute(1, [*tokens, 10], 10)
