"""Guesses of several drafters in one tree: merged, weighed, chosen, scored; against brute force."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.draft.candid import Guess
from forerun.draft.merging import SILENT, GuessTree
from forerun.draft.tallies import Record, Tallies
from forerun.draft.worth import worth

PATHS = st.lists(st.integers(0, 2), max_size=4)


def weighed(*guesses: Guess, record: Record | None = None, least: float = 0.0) -> GuessTree:
    tree = GuessTree()
    for drafter, guess in enumerate(guesses):
        tree.add(drafter, guess)
    tree.weigh(record or Record(Tallies()), least)
    return tree


def chosen(tree, most=15, row_cost=0.05, branching=True):
    return tree.choose(most, row_cost, share=1.0, paid=0.0, branching=branching)


def sure(*tokens: int, chance: float = 0.9) -> Guess:
    return Guess(tokens, chances=[chance] * len(tokens))


def test_what_drafters_agree_on_is_there_once():
    tree = weighed(sure(5, 6, 7), sure(5, 6, 8))
    assert len(tree) == 4
    choice = chosen(tree, row_cost=0.0)
    assert (choice.tokens, choice.parents) == ([5, 6, 7, 8], [0, 1, 2, 2])
    assert not choice.is_path
    assert choice.first_path() == [5, 6, 7]


def test_one_path_is_asked_for_and_given():
    tree = weighed(sure(5, 6, chance=0.5), sure(9, 8, 7, chance=0.8))
    choice = chosen(tree, branching=False)
    assert (choice.tokens, choice.parents, choice.backer) == ([9, 8, 7], [0, 1, 2], 1)
    assert choice.is_path


def test_dear_rows_cut_the_tail():
    tree = weighed(sure(5, 6, 7, 8, chance=0.6))
    lengths = [len(chosen(tree, row_cost=cost).tokens) for cost in (0.0, 0.1, 0.2, 0.5)]
    assert lengths == [4, 3, 2, 0]
    assert chosen(tree, row_cost=0.5).backer is None


def test_no_more_than_may_be_drafted():
    tree = weighed(sure(*range(20)), sure(50, 51))
    for branching in (True, False):
        assert len(chosen(tree, most=3, row_cost=0.0, branching=branching).tokens) == 3
        assert chosen(tree, most=0, branching=branching).tokens == []


def test_trees_of_a_silent_drafter_have_chances_by_rank():
    guess = Guess([1, 2, 3], parents=[0, 0, 1])
    choice = chosen(weighed(guess), row_cost=0.0)
    assert (choice.tokens, choice.parents) == ([1, 3, 2], [0, 1, 0])
    value = worth(SILENT[0] + SILENT[0] ** 2 + SILENT[1], 0.0)
    assert choice.worth == pytest.approx(value)


@settings(max_examples=150, deadline=None)
@given(
    paths=st.lists(PATHS, min_size=1, max_size=3),
    chances=st.lists(st.sampled_from([0.2, 0.5, 0.8]), min_size=12, max_size=12),
    row_cost=st.sampled_from([0.0, 0.05, 0.14, 0.4]),
    most=st.integers(0, 4),
    branching=st.booleans(),
)
def test_the_choice_is_the_best_of_all(paths, chances, row_cost, most, branching):
    tree = GuessTree()
    for drafter, path in enumerate(paths):
        own = chances[drafter * 4 : drafter * 4 + len(path)]
        tree.add(drafter, Guess(path, chances=own))
    tree.weigh(Record(Tallies()))
    nodes = range(1, len(tree) + 1)
    parents, holds = tree._parents, tree._holds
    best = worth(0, 0)
    for size in range(min(most, len(tree)) + 1):
        for part in combinations(nodes, size):
            own = {0, *part}
            if any(parents[node] not in own for node in part):
                continue
            children = [parents[node] for node in part]
            if branching or len(set(children)) == len(children):
                gain = sum(holds[node] for node in part)
                best = max(best, worth(gain, row_cost * size))
    choice = tree.choose(most, row_cost, share=1.0, paid=0.0, branching=branching)
    assert choice.worth == pytest.approx(best)
    gain = 0.0
    for token, parent in zip(choice.tokens, choice.parents, strict=True):
        assert isinstance(token, int)
        assert parent <= len(choice.tokens)
    assert all(parent < node for node, parent in enumerate(choice.parents, 1))
    assert branching or choice.is_path
    # What is chosen is worth what is said.
    number = {0: 0}
    for token, parent in zip(choice.tokens, choice.parents, strict=True):
        number[len(number)] = tree._nodes[number[parent], token]
    gain = sum(holds[node] for index, node in number.items() if index)
    assert choice.worth == pytest.approx(worth(gain, row_cost * len(choice.tokens)))


def test_every_guess_is_scored_whether_it_was_drafted_or_not():
    traffic = Tallies()
    record = Record(traffic)
    tree = weighed(sure(5, 6, 7), sure(5, 9, 1, chance=0.6), record=record)
    tree.score([5, 6, 4], record)
    # 5: both held; behind it 6 held and 9 did not; 7 did not; 1 was never put to the test.
    counts = {kind[0]: tuple(own) for kind, own in traffic._counts.items()}
    assert counts == {0b11: (1, 1), 0b01: (1, 2), 0b10: (0, 1)}


def test_nothing_is_known_behind_the_end_of_the_text():
    traffic = Tallies()
    record = Record(traffic)
    tree = weighed(sure(5, 6, 7), record=record)
    tree.score([5], record)
    assert sum(tried for _, tried in traffic._counts.values()) == 1


def test_scores_move_the_next_choice():
    record = Record(Tallies())
    for _ in range(60):
        tree = weighed(sure(5, 6, 7), record=record)
        tree.score([8], record)
    assert chosen(weighed(sure(5, 6, 7), record=record), row_cost=0.14).tokens == []
    fresh = Record(record._traffic)  # another request of this traffic knows as much
    assert chosen(weighed(sure(5, 6, 7), record=fresh), row_cost=0.14).tokens == []


def test_a_request_is_told_from_the_traffic():
    traffic = Tallies()
    bad, good = Record(traffic), Record(traffic)
    for _ in range(40):
        for record, text in ((bad, [8]), (good, [5, 6, 7, 1])):
            weighed(sure(5, 6, 7), record=record).score(text, record)
    assert chosen(weighed(sure(5, 6, 7), record=bad), row_cost=0.14).tokens == []
    assert chosen(weighed(sure(5, 6, 7), record=good), row_cost=0.14).tokens == [5, 6, 7]


def test_who_is_contradicted_is_less_likely():
    agreed, alone = sure(5, chance=0.5), sure(6, chance=0.5)
    values = [
        chosen(weighed(*guesses), most=1, row_cost=0.0).worth
        for guesses in ((agreed,), (agreed, agreed), (agreed, alone))
    ]
    assert values[0] == values[1] > values[2]


def test_what_follows_an_unlikely_token_is_not_looked_at():
    record = Record(Tallies())
    tree = weighed(sure(5, 6, 7, chance=0.1), record=record, least=0.5)
    assert chosen(tree, row_cost=0.0).tokens == [5]
    tree.score([5, 6, 7], record)
    assert sum(tried for _, tried in record._traffic._counts.values()) == 1


def test_the_traffic_forgets_and_a_rate_is_its_prior_at_first():
    tallies = Tallies(most=10)
    assert tallies.rate("kind", 0.3, 5) == 0.3
    for _ in range(200):
        tallies.add("kind", True)
    for _ in range(10):
        tallies.add("kind", False)
    assert tallies.rate("kind", 0.3, 0) < 0.5


def test_guesses_say_how_far_they_held_and_how_deep_they_are():
    path = Guess([4, 5, 6])
    assert [path.count_held(text) for text in ([], [4], [4, 5, 9], [4, 5, 6, 7], [9])] == [
        0, 1, 2, 3, 0,
    ]  # fmt: skip
    tree = Guess([4, 5, 6, 7], parents=[0, 0, 2, 3])
    assert tree.count_held([5, 6, 7, 8]) == 3
    assert tree.count_held([4, 6]) == 1
    assert (path.depth, tree.depth, Guess().depth) == (3, 3, 0)
