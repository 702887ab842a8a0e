"""Drafts from a request's own text and its tenant's past outputs, against counting in both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.draft import suffix
from forerun.draft.suffix import Evidence, SuffixDrafter, follow
from forerun.draft.suffix_forget import ForgettingTree
from forerun.draft.suffix_store import SuffixStore
from forerun.draft.suffix_tree import DEPTH, SuffixTree
from forerun.params import SamplingParams
from forerun.types import DraftRequest

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=20)


def request(key: int, tokens: list[int], salt: str = "", count: int = 15) -> DraftRequest:
    return DraftRequest(key, tokens, count, params=SamplingParams(cache_salt=salt))


def answer(drafter: SuffixDrafter, key: int, prompt: list[int], output: list[int], salt: str):
    """Play a request through the drafter, as the engine would."""
    tokens = list(prompt)
    drafter.start(request(key, tokens, salt))
    drafter.propose([request(key, tokens, salt)])
    tokens.extend(output)
    drafter.finish(key)


def draft(drafter: SuffixDrafter, key: int, tokens: list[int], salt: str) -> list[int]:
    drafter.start(request(key, tokens, salt))
    proposal = drafter.propose([request(key, tokens, salt)])
    drafter.finish(key)
    return proposal.tokens[0, : int(proposal.lengths[0])].tolist()


def test_an_answer_is_drafted_again_for_the_same_tenant_alone():
    drafter = SuffixDrafter(SuffixStore(1000, 60))
    answer(drafter, 0, [1, 2, 3], [4, 5, 6, 7, 8, 9], "a")
    assert draft(drafter, 1, [50, 4, 5], "a")[:2] == [6, 7]
    assert draft(drafter, 2, [50, 4, 5], "b") == []
    assert draft(drafter, 3, [50, 4, 5], "") == []
    # Prompts are not kept.
    assert draft(drafter, 4, [50, 1, 2], "a") == []


def test_without_a_store_nothing_is_remembered():
    drafter = SuffixDrafter()
    answer(drafter, 0, [1, 2, 3], [4, 5, 6, 7, 8, 9], "a")
    assert draft(drafter, 1, [50, 4, 5], "a") == []


def test_what_was_answered_often_is_followed_farther():
    drafter = SuffixDrafter(SuffixStore(1000, 60))
    output = list(range(10, 30))
    lengths = []
    for key in range(4):
        answer(drafter, key, [1, 2, 3], output, "a")
        lengths.append(len(draft(drafter, 100 + key, [1, 10, 11], "a")))
    assert lengths == sorted(lengths)
    assert 0 < lengths[0] < lengths[-1]


def trees(own: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[Evidence]:
    """Put a request and a store beside each other."""
    local, shelf = SuffixTree(), ForgettingTree()
    local.extend(own)
    for output in outputs:
        shelf.add(output)
    return [Evidence(local), Evidence(shelf, suffix.STORE_WEIGHT)]


def drafts(own: Sequence[int], outputs: Sequence[Sequence[int]]) -> Iterator[tuple[int, float]]:
    return follow(trees(own, outputs), own, 1, 0)


def test_ones_own_text_counts_more():
    outputs = [[1, 2, 7]]
    assert next(drafts([1, 2, 8, 1, 2], outputs))[0] == 8
    assert next(drafts([1, 2, 8, 1, 2], outputs * 5))[0] == 7
    # The longer run decides, whoever knows it.
    assert next(drafts([2, 8, 1, 2], outputs))[0] == 7
    assert next(drafts([1, 2, 8, 1, 2], [[2, 7]] * 9))[0] == 8


def test_of_the_same_evidence_ones_own_is_surer():
    [(_, own)] = drafts([1, 2, 3, 1, 2], [])
    [(_, kept)] = drafts([1, 2], [[1, 2, 3]])
    [(_, both)] = drafts([1, 2, 3, 1, 2], [[1, 2, 3]])
    assert kept < own < both


@settings(max_examples=300, deadline=None)
@given(
    own=TEXT,
    outputs=st.lists(TEXT, max_size=5),
    passed=st.lists(TEXT, max_size=3),
    least=st.sampled_from([0.0, 0.06, 0.3]),
)
def test_a_draft_is_what_counting_both_says(own, outputs, passed, least):
    """Every token of a draft, and its end, from the texts themselves."""
    found = trees(own, [*passed, *outputs])
    shelf = found[1].tree
    for _ in passed:
        shelf.forget()
    drafted = list(follow(found, own, 6, least))
    text, likely, longest = list(own), 1.0, DEPTH
    for token, claimed in drafted:
        length, counted, total = weigh(own, outputs, text, longest)
        favourites = {
            max(pair, key=lambda each: counted[each])
            for pair in favourite_pairs(own, outputs, text[len(text) - length :])
        }
        assert token in favourites
        likely *= counted[token] / (total + suffix.DOUBT / length**suffix.SURENESS)
        assert claimed == pytest.approx(likely)
        assert likely >= least
        text.append(token)
        longest = min(length + 1, DEPTH)
    if len(drafted) < 6:
        length, counted, total = weigh(own, outputs, text, longest)
        if length:
            run = text[len(text) - length :]
            sure = total + suffix.DOUBT / length**suffix.SURENESS
            pairs_ = favourite_pairs(own, outputs, run)
            assert any(likely * max(counted[t] for t in pair) / sure < least for pair in pairs_)


def behind(texts: Sequence[Sequence[int]], run: Sequence[int]) -> Counter[int]:
    size = len(run)
    return Counter(
        text[at + size]
        for text in texts
        for at in range(len(text) - size)
        if list(text[at : at + size]) == list(run)
    )


def weigh(own, outputs, text, longest):
    """Find the longest run that anything followed: its length, weighed followers, their sum."""
    for length in range(min(longest, len(text)), 0, -1):
        run = text[len(text) - length :]
        ours, theirs = behind([own], run), behind(outputs, run)
        if ours or theirs:
            weighed = Counter({token: float(times) for token, times in ours.items()})
            for token, times in theirs.items():
                weighed[token] += suffix.STORE_WEIGHT * times
            return length, weighed, sum(weighed.values())
    return 0, Counter(), 0.0


def favourite_pairs(own, outputs, run):
    """List what the two sides may name as their most frequent: one's own is the latest."""
    ours = [
        own[at + len(run)] for at in range(len(own) - len(run)) if own[at : at + len(run)] == run
    ]
    theirs = behind(outputs, run)
    last = {token: at for at, token in enumerate(ours)}
    first = [max(last, key=lambda token: (ours.count(token), last[token]))] if ours else []
    named = [token for token in theirs if theirs[token] == max(theirs.values())] or [None]
    return [[*first, *([] if token is None else [token])] for token in named]
