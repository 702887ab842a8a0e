"""The n-gram drafter against a twin that rescans the whole text, and what a step costs it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.draft.ngram import NgramDrafter, NgramIndex, continuation
from forerun.types import DraftRequest


def slow_guess(tokens: Sequence[int], shortest: int, longest: int, count: int) -> list[int]:
    """Scan backwards for the longest suffix; what follows is copied as the text grows.

    The more tokens before it agree with the newest ones, the more is copied: 2 n + 1.
    """
    tokens = list(tokens)
    for size in range(longest, shortest - 1, -1):
        if size >= len(tokens):
            continue
        suffix = tokens[len(tokens) - size :]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                grown, distance = list(tokens), len(tokens) - start - size
                agreeing = 0
                while (
                    agreeing < start + size
                    and tokens[-1 - agreeing - distance] == tokens[-1 - agreeing]
                ):
                    agreeing += 1
                for _ in range(min(count, 2 * agreeing + 1)):
                    grown.append(grown[len(grown) - distance])
                return grown[len(tokens) :]
    return []


def guess(drafter: NgramDrafter, request_id: int, tokens: Sequence[int], count: int) -> list[int]:
    proposal = drafter.propose([DraftRequest(request_id, tokens, count)])
    return proposal.tokens[0, : int(proposal.lengths[0])].tolist()


def started(*request_ids: int, shortest: int = 2, longest: int = 4) -> NgramDrafter:
    drafter = NgramDrafter(shortest, longest)
    for request_id in request_ids:
        drafter.start(DraftRequest(request_id, [], 0))
    return drafter


TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@settings(max_examples=300, deadline=None)
@given(
    tokens=TEXTS,
    growth=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12),
    bounds=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    count=st.integers(1, 9),
)
def test_it_equals_a_full_rescan(tokens, growth, bounds, count):
    shortest, longest = bounds
    drafter, tokens = started(1, shortest=shortest, longest=longest), list(tokens)
    for more in [[], *growth]:
        tokens.extend(more)
        assert guess(drafter, 1, tokens, count) == slow_guess(tokens, shortest, longest, count)


@settings(max_examples=100, deadline=None)
@given(tokens=TEXTS, pauses=st.lists(st.booleans(), min_size=60, max_size=60))
def test_steps_without_a_question_are_caught_up_on(tokens, pauses):
    drafter = started(1)
    for end in range(1, len(tokens) + 1):
        if pauses[end - 1]:
            guess(drafter, 1, tokens[:end], 0)  # asked for nothing: nothing
        else:
            assert guess(drafter, 1, tokens[:end], 4) == slow_guess(tokens[:end], 2, 4, 4)


def test_the_longest_suffix_wins_over_a_later_one():
    #         1 2 3 -> 9          2 3 -> 8 is later, but shorter
    tokens = [1, 2, 3, 9, 0, 2, 3, 8, 0, 1, 2, 3]
    assert guess(started(1), 1, tokens, 1) == [9]
    assert guess(started(1, longest=2), 1, tokens, 1) == [8]


def test_the_latest_of_equals_wins():
    tokens = [1, 2, 7, 1, 2, 8, 1, 2]
    assert guess(started(1), 1, tokens, 1) == [8]


def test_nothing_known_is_no_guess():
    assert guess(started(1), 1, [1, 2, 3, 4], 5) == []
    assert guess(started(1), 1, [1], 5) == []
    assert guess(started(1), 1, [1, 1], 5) == []  # a suffix of two does not occur earlier
    assert guess(started(1, shortest=1), 1, [1, 1], 3) == [1, 1, 1]


def test_a_longer_match_is_followed_further():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert guess(started(1, shortest=1), 1, [*text, 90, 3], 15) == [4, 5, 6]
    assert guess(started(1), 1, [*text, 90, 2, 3], 15) == [4, 5, 6, 7, 8]
    assert guess(started(1), 1, [*text, 90, 1, 2, 3], 15) == [4, 5, 6, 7, 8, 9, 10]
    assert guess(started(1), 1, [*text, 90, 1, 2, 3], 2) == [4, 5]


def test_a_repetition_is_guessed_to_go_on():
    assert guess(started(1), 1, [5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]
    assert continuation([1, 2, 1, 2], 2, 5) == [1, 2, 1, 2, 1]
    assert continuation([4, 4], 1, 3) == [4, 4, 4]


def test_requests_know_nothing_of_each_other():
    drafter = started(1, 2)
    alone = started(2)
    first, second = [1, 2, 3, 4, 1, 2], [9, 1, 2]
    proposal = drafter.propose([DraftRequest(1, first, 3), DraftRequest(2, second, 3)])
    assert proposal.lengths.tolist() == [3, 0]
    assert guess(alone, 2, second, 3) == []
    drafter.finish(1)
    drafter.start(DraftRequest(3, [], 0))
    assert guess(drafter, 3, [7, 1, 2], 3) == []


def test_an_id_that_comes_again_starts_afresh():
    drafter = started(1)
    guess(drafter, 1, [1, 2, 3, 1, 2], 3)
    drafter.finish(1)
    drafter.start(DraftRequest(1, [], 0))
    assert guess(drafter, 1, [8, 1, 2], 3) == []


def test_finish_drops_all_state():
    drafter = started(1, 2)
    for request_id in (1, 2):
        guess(drafter, request_id, list(range(100)), 3)
        drafter.finish(request_id)
    drafter.finish(2)  # again: nothing to drop
    assert drafter._indexes == {}


class Counted(Sequence):
    """A list that counts how many of its tokens were looked at."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, key):
        found = self.tokens[key]
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):
        self.num_read += len(self.tokens)
        return iter(self.tokens)


def reads_per_step(context: int, steps: int = 50) -> list[int]:
    """Tokens read in each step that adds three tokens to a context of the given length."""
    tokens = Counted([(7 * i * i + i // 5) % 50 for i in range(context)])
    drafter, reads = started(1), []
    guess(drafter, 1, tokens, 8)
    for step in range(steps):
        tokens.tokens.extend([step % 50, (step * 3) % 50, 1])
        tokens.num_read = 0
        guess(drafter, 1, tokens, 8)
        reads.append(tokens.num_read)
    return reads


def test_a_step_costs_the_same_at_32k_tokens_as_at_100():
    short, long = reads_per_step(100), reads_per_step(32_768)
    # three new places with a window of four each, a suffix of four, two comparisons for each of
    # at most eight matched tokens, a draft of eight
    assert max(long) <= 3 * 4 + 4 + 2 * 8 + 2 + 8
    assert max(long) <= max(short) + 26
    assert min(long) > 0


def test_the_first_step_reads_each_token_a_fixed_number_of_times():
    tokens = Counted([(7 * i * i) % 1000 for i in range(32_768)])
    guess(started(1), 1, tokens, 8)
    assert tokens.num_read <= 4 * 32_768 + 30


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 32), (3, 3)])
def test_an_index_finds_places_not_copies(shortest, longest):
    index, tokens = NgramIndex(shortest, longest), [7, 8, 9, 1, 7, 8, 9]
    index.extend(tokens)
    assert index.find(tokens) == 3


def test_dear_rows_make_drafts_as_long_as_their_evidence():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 1, 2, 3]
    for row_cost, length in ((0.0, 7), (0.04, 7), (0.06, 3), (1.0, 3)):
        drafter = started(1, shortest=1)
        proposal = drafter.propose([DraftRequest(1, tokens, 15, row_cost)])
        assert proposal.tokens[0].tolist() == [4, 5, 6, 7, 8, 9, 9][:length]
