"""The store of past outputs against a list for each tenant: what is kept, for whom, how long."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.config import SpeculationConfig
from forerun.draft import suffix_store
from forerun.draft.suffix_store import SuffixStore
from forerun.errors import ConfigError

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=20)


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Counting:
    """A store as it is told in one sentence: a list for each tenant."""

    max_tokens: int
    max_age_s: float
    kept: dict[str, list[tuple[float, list[int]]]] = field(default_factory=dict)

    def total(self) -> int:
        return sum(len(text) for texts in self.kept.values() for _, text in texts)

    def add(self, salt: str, text: list[int], now_s: float) -> None:
        text = text[: self.max_tokens // suffix_store.LONGEST_PART]
        self.expire(now_s)
        if len(text) < 2 or not salt:
            return
        while self.total() + len(text) > self.max_tokens:
            sizes = {
                key: sum(len(each) for _, each in texts) + len(text) * (key == salt)
                for key, texts in self.kept.items()
                if texts
            }
            victim = max(sizes, key=sizes.__getitem__)  # of equals, who kept something longest ago
            self.kept[victim].pop(0)
        self.kept[salt] = [*self.kept.pop(salt, []), (now_s, text)]

    def expire(self, now_s: float) -> None:
        for texts in self.kept.values():
            texts[:] = [each for each in texts if now_s - each[0] <= self.max_age_s]

    def texts(self, salt: str) -> list[list[int]]:
        return [text for _, text in self.kept.get(salt, [])]


def contents(store: SuffixStore, salt: str, alphabet: int = 4) -> Counter[tuple[int, ...]]:
    """Read all counted pairs of a tenant."""
    tree = store.tree(salt)
    if tree is None:
        return Counter()
    return Counter(
        {
            (a, b): count
            for a in range(alphabet)
            for b in range(alphabet)
            if (count := tree.count([a], b))
        }
    )


def pairs(texts: Sequence[Sequence[int]]) -> Counter[tuple[int, ...]]:
    return Counter(pair for text in texts for pair in itertools.pairwise(text))


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from("abc"), TEXT, st.integers(0, 4)), max_size=25),
    max_tokens=st.sampled_from([24, 61, 1000]),
)
def test_it_keeps_what_counting_says(steps, max_tokens):
    clock, twin = Clock(), Counting(max_tokens, 10)
    store = SuffixStore(max_tokens, 10, clock=clock)
    for salt, text, wait in steps:
        clock.now_s += wait
        store.add(salt, text)
        twin.add(salt, text, clock.now_s)
        for key in "abc":
            assert contents(store, key) == pairs(twin.texts(key))
        assert store.num_tokens == twin.total() <= max_tokens


def test_tenants_see_nothing_of_each_other():
    store = SuffixStore(1000, 60)
    store.add("a", [1, 2, 3])
    store.add("b", [1, 2, 0])
    assert contents(store, "a") == {(1, 2): 1, (2, 3): 1}
    assert contents(store, "b") == {(1, 2): 1, (2, 0): 1}
    assert store.tree("c") is None


def test_without_a_salt_nothing_is_kept_unless_the_operator_says_so():
    closed, shared = SuffixStore(1000, 60), SuffixStore(1000, 60, shared=True)
    for store in (closed, shared):
        store.add("", [1, 2, 3])
        store.add("a", [3, 2, 1])
    assert (closed.num_tenants, shared.num_tenants) == (1, 2)
    assert contents(closed, "") == {}
    assert contents(shared, "") == {(1, 2): 1, (2, 3): 1}
    assert contents(shared, "a") == {(3, 2): 1, (2, 1): 1}


def test_what_is_too_old_is_never_shown():
    clock = Clock()
    store = SuffixStore(1000, 60, clock=clock)
    store.add("a", [1, 2])
    clock.now_s = 30
    store.add("a", [2, 3])
    clock.now_s = 60
    assert contents(store, "a") == {(1, 2): 1, (2, 3): 1}
    clock.now_s = 61
    assert contents(store, "a") == {(2, 3): 1}
    clock.now_s = 91
    assert store.tree("a") is None
    assert (store.num_tokens, store.num_tenants) == (0, 0)


def test_what_is_too_old_goes_whoever_asks():
    clock = Clock()
    store = SuffixStore(1000, 60, clock=clock)
    store.add("a", [1, 2])
    clock.now_s = 100
    assert store.tree("b") is None
    assert store.num_tokens == 0


def test_much_that_is_too_old_goes_in_pieces_and_is_not_shown_meanwhile(monkeypatch):
    monkeypatch.setattr(suffix_store, "EXPIRED_AT_ONCE", 10)
    clock = Clock()
    store = SuffixStore(1000, 60, clock=clock)
    for _ in range(10):
        store.add("a", [1, 2, 1, 2])
    clock.now_s = 50
    store.add("a", [2, 3])
    clock.now_s = 61
    sizes = []
    while store.tree("a") is None:
        sizes.append(store.num_tokens)
    assert sizes == [30, 18, 6]
    assert contents(store, "a") == {(2, 3): 1}


def test_whoever_fills_the_store_pushes_out_itself():
    store = SuffixStore(100, 60)
    for salt in "ab":
        for _ in range(2):
            store.add(salt, [0, 1] * 5)
    before = [contents(store, salt) for salt in "ab"]
    for turn in range(200):
        store.add("flood", [2, 3] * (1 + turn % 12))
        assert store.num_tokens <= 100
    assert [contents(store, salt) for salt in "ab"] == before
    assert contents(store, "flood")[2, 3] > 10


def test_a_lone_tenant_may_use_all_of_it():
    store = SuffixStore(100, 60)
    for _ in range(50):
        store.add("a", [0, 1] * 5)
    assert store.num_tokens == 100


def test_a_newcomer_finds_room():
    store = SuffixStore(100, 60)
    for _ in range(10):
        store.add("a", [0, 1] * 5)
    for _ in range(5):
        store.add("b", [2, 3] * 5)
    assert contents(store, "b")[2, 3] == 25
    assert store.num_tokens == 100


def test_one_long_output_does_not_take_everything():
    store = SuffixStore(100, 60)
    store.add("a", [0, 1] * 10)
    store.add("b", [2, 3] * 500)
    assert contents(store, "a")[0, 1] == 10
    assert contents(store, "b")[2, 3] == 12
    assert store.num_tokens == 45


def test_the_number_of_tenants_is_bounded(monkeypatch):
    """Each has a tree of its own: who was heard of longest ago goes."""
    monkeypatch.setattr(suffix_store, "MAX_TENANTS", 3)
    store = SuffixStore(10**6, 60)
    for salt in ("a", "b", "c", "a", "d"):
        store.add(salt, [0, 1])
    assert store.num_tenants == 3
    assert [store.tree(salt) is not None for salt in "abcd"] == [True, False, True, True]
    assert store.num_tokens == 8


def test_the_trees_shrink_with_the_store():
    store = SuffixStore(1200, 10**6)
    most = 0
    for turn in range(300):
        store.add("ab"[turn % 2], [(turn * 31 + place * place) % 97 for place in range(60)])
        nodes = [store.tree(salt).num_nodes for salt in "ab" if store.tree(salt)]
        most = max(most, sum(nodes))
        assert sum(nodes) <= 2 + 8 * store.num_tokens
    assert store.num_tokens == 1200
    assert most < 6 * 1200  # what passed through is 15 times as much


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix_store_tokens", -1), ("suffix_store_tokens", 5), ("suffix_store_tokens", 1e6),
        ("suffix_store_age_s", 0), ("suffix_store_age_s", True), ("suffix_store_shared", 1),
    ],
    ids=repr,
)  # fmt: skip
def test_settings_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        SpeculationConfig(**{name: value})


def test_a_store_for_a_drafter_that_keeps_none_is_refused():
    with pytest.raises(ConfigError, match="drafter='ngram'"):
        SpeculationConfig(drafter="ngram", suffix_store_tokens=5000)
    SpeculationConfig(drafter="suffix", suffix_store_tokens=5000)
