"""The suffix drafter against a twin that counts in the whole text each time."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.draft import suffix
from forerun.draft.suffix import Evidence, SuffixDrafter, follow
from forerun.draft.suffix_tree import DEPTH, SuffixTree
from forerun.types import DraftRequest

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=50)


def slow_guess(tokens: Sequence[int], most: int, least: float, depth: int = DEPTH) -> list[int]:
    """Count what followed each place that looks like the end; the draft is no evidence of itself.

    The draft's next run may not be longer than what the run before it, and one token, explain.
    """
    text, draft, likely, longest = list(tokens), [], 1.0, depth
    while len(draft) < most:
        for length in range(min(longest, len(text) + len(draft)), 0, -1):
            run = [*text, *draft][-length:]
            followers = [
                text[start + length]
                for start in range(len(text) - length)
                if text[start : start + length] == run
            ]
            if followers:
                break
        else:
            return draft
        # The most frequent, of several the one that came last.
        last = {token: place for place, token in enumerate(followers)}
        best = max(last, key=lambda token: (followers.count(token), last[token]))
        doubt = suffix.DOUBT / length**suffix.SURENESS
        likely *= followers.count(best) / (len(followers) + doubt)
        if likely < least:
            return draft
        draft.append(best)
        longest = min(length + 1, depth)
    return draft


def guess(drafter: SuffixDrafter, request_id: int, tokens: Sequence[int], count: int) -> list[int]:
    proposal = drafter.propose([DraftRequest(request_id, tokens, count)])
    return proposal.tokens[0, : int(proposal.lengths[0])].tolist()


def started(*request_ids: int) -> SuffixDrafter:
    drafter = SuffixDrafter()
    for request_id in request_ids:
        drafter.start(DraftRequest(request_id, [], 0))
    return drafter


@settings(max_examples=300, deadline=None)
@given(
    tokens=TEXTS,
    growth=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=8),
    most=st.integers(1, 9),
    least=st.sampled_from([0.0, 0.06, 0.2, 0.5]),
    depth=st.integers(1, 9),
)
def test_it_equals_counting_in_the_whole_text(tokens, growth, most, least, depth):
    tree, tokens = SuffixTree(depth), list(tokens)
    tree.extend(tokens)
    for more in [[], *growth]:
        tokens.extend(more)
        tree.extend(more)
        draft = [token for token, _ in follow([Evidence(tree)], tokens, most, least)]
        assert draft == slow_guess(tokens, most, least, depth)


def test_what_came_more_often_wins_over_what_came_last():
    assert guess(started(1), 1, [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2], 1) == [7]
    assert guess(started(1), 1, [1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_what_was_always_the_same_is_followed_far():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    once = guess(started(1), 1, [*text, 90, 3], 15)
    often = guess(started(1), 1, [*text, 91, *text, 92, *text, 90, 3], 15)
    assert 0 < len(once) < len(often)
    assert often[:9] == text[3:]


def test_dear_rows_make_short_drafts():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 90, 1, 2]
    cheap, dear = started(1), started(1)
    assert len(guess(cheap, 1, tokens, 15)) > 1
    proposal = dear.propose([DraftRequest(1, tokens, 15, row_cost=0.9)])
    assert proposal.lengths.tolist() == [0]


def test_nothing_known_is_no_guess():
    assert guess(started(1), 1, [1, 2, 3, 4], 5) == []
    assert guess(started(1), 1, [1], 5) == []
    assert guess(started(1), 1, [1, 1, 1], 0) == []


def test_requests_know_nothing_of_each_other():
    drafter = started(1, 2)
    proposal = drafter.propose([DraftRequest(1, [1, 2, 3, 1, 2], 3), DraftRequest(2, [9, 1, 2], 3)])
    assert proposal.lengths.tolist()[0] > 0
    assert proposal.lengths.tolist()[1] == 0


def test_an_id_that_comes_again_starts_afresh():
    drafter = started(1)
    assert guess(drafter, 1, [1, 2, 3, 1, 2], 3)
    drafter.finish(1)
    drafter.finish(1)  # again: nothing to drop
    drafter.start(DraftRequest(1, [], 0))
    assert guess(drafter, 1, [8, 1, 2], 3) == []
