"""A tree that forgets, against counting in the texts that are left."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from forerun.draft.suffix_forget import ForgettingTree

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=12)
STEPS = st.lists(st.one_of(TEXT, st.none()), max_size=14)  # a text comes in; None: one goes


def followers(texts: Sequence[Sequence[int]], run: Sequence[int]) -> Counter[int]:
    """Count in plain sight what comes after a run."""
    size = len(run)
    return Counter(
        text[start + size]
        for text in texts
        for start in range(len(text) - size)
        if list(text[start : start + size]) == list(run)
    )


def runs_of(texts: Sequence[Sequence[int]], longest: int) -> set[tuple[int, ...]]:
    return {
        tuple(text[start : start + size])
        for text in texts
        for size in range(1, longest + 1)
        for start in range(len(text) - size + 1)
    }


def assert_counts(tree: ForgettingTree, texts: Sequence[Sequence[int]]) -> None:
    known = runs_of(texts, tree.depth)
    assert tree.num_texts == len(texts)
    assert tree.num_nodes <= 1 + (tree.depth + 1) * sum(map(len, texts))
    for run in known:
        want, found = followers(texts, run), tree.followers(run)
        for token in range(4):
            assert tree.count(run, token) == want[token]
        if found is None:
            assert not want
        else:
            assert found.total == want.total()
            assert found.times == want[found.token] == max(want.values())
    # And nothing else is known.
    for longer in {(*run, token) for run in known | {()} for token in range(4)} - known:
        assert len(longer) > tree.depth or tree.followers(longer) is None


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, depth=st.integers(1, 5))
@example(steps=[[0, 1, 2], [0, 1, 2, 0], None, [1, 2], None, None], depth=3)
def test_it_equals_counting_in_what_is_left(steps, depth):
    tree, texts = ForgettingTree(depth), []
    for text in steps:
        if text is not None:
            tree.add(text)
            texts.append(text)
        elif texts:
            assert tree.forget() == len(texts.pop(0))
        assert_counts(tree, texts)
    while texts:
        tree.forget()
        texts.pop(0)
        assert_counts(tree, texts)
    assert tree.num_nodes == 1


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=8), depth=st.integers(1, 5))
def test_what_came_and_went_leaves_no_trace(texts, depth):
    """A tree through which other texts passed draws its answers as a fresh one does."""
    used, fresh = ForgettingTree(depth), ForgettingTree(depth)
    for text in texts:
        used.add(text)
    for text in texts:
        used.add(text)
        used.forget()
        fresh.add(text)
    for run in runs_of(texts, depth):
        ours, theirs = used.followers(run), fresh.followers(run)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours.times, ours.total) == (theirs.times, theirs.total)


def test_memory_does_not_grow_with_what_has_passed_through():
    """Nodes are used again, and the text is cut at its front."""
    dice = random.Random(0)
    tree = ForgettingTree()
    sizes = []
    for turn in range(400):
        tree.add([dice.randrange(12) for _ in range(50)])
        if turn >= 10:
            tree.forget()
        sizes.append((tree.num_nodes, len(tree._counts), len(tree._text), len(tree._ranks)))
    early, late = sizes[50:200], sizes[200:]
    for column in range(4):
        most = max(size[column] for size in early)
        assert max(size[column] for size in late) <= 1.2 * most + 10
    while tree.num_texts:
        tree.forget()
    assert (tree.num_nodes, len(tree._text), len(tree._ranks)) == (1, 0, 0)
