"""Written prompts are screened: repetition, rubbish and what was said before."""

from __future__ import annotations

import pytest

from forerun.train.screen import Seen, end_whole, fault_of, is_loop, is_repetitive

PROSE = (
    "The old shed needs a new roof before the winter. Anna asked three firms for an offer and "
    "will bring the answers to the next meeting."
)
WORDS = list(range(100, 140))


def test_prose_is_not_repetitive_and_loops_are() -> None:
    assert not is_repetitive(PROSE)
    assert is_repetitive("made of wood, " * 12)
    assert not is_repetitive("ha ha ha ha")  # too short to judge


@pytest.mark.parametrize(
    ("text", "num_tokens", "fault"),
    [
        (PROSE, 30, None),
        ("What is", 2, "too short"),
        ("什么是神经网络", 4, None),
        ("Why?", 9, "too short"),
        ("Half a character \ufffd here", 9, "not text"),
        ("A bell \x07 rings somewhere", 9, "not text"),
        ("Two lines\n\tand a tab", 9, None),
        ("the fox and " * 20, 80, "repetitive"),
    ],
)
def test_faults_of_prompts(text: str, num_tokens: int, fault: str | None) -> None:
    assert fault_of(text, num_tokens) == fault


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("One. Two! Thr", "One. Two!"),
        ('He said "go." And th', 'He said "go."'),
        ("a list:\n- one\n- tw", "a list:\n- one"),
        ("no end at all", ""),
        ("Fine already?", "Fine already?"),
        ("好的。还", "好的。"),
    ],
)
def test_cut_text_ends_whole(text: str, whole: str) -> None:
    assert end_whole(text) == whole


@pytest.mark.parametrize("period", [1, 2, 7, 8, 9, 40, 64])
def test_a_loop_is_noticed_at_its_third_round_and_not_before(period: int) -> None:
    ids = [5, 6, *list(range(100, 100 + period)) * 30]
    ends = [end for end in range(len(ids) + 1) if is_loop(ids, end)]
    assert ends[0] == 2 + max(3 * period, 24)


def test_no_loop_in_what_differs_or_is_longer_than_looked_for() -> None:
    assert not any(is_loop(list(range(200)), end) for end in range(201))
    long = list(range(65)) * 5
    assert not any(is_loop(long, end) for end in range(len(long) + 1))
    nearly = [token for number in range(40) for token in (1, 2, 3, 100 + number)]
    assert not any(is_loop(nearly, end) for end in range(len(nearly) + 1))


def test_the_same_and_nearly_the_same_are_known() -> None:
    seen = Seen()
    assert not seen.knows(WORDS)
    seen.add(WORDS)
    assert seen.knows(WORDS)
    assert seen.knows([*WORDS[:35], 1, 2, 3])  # most runs of eight are the same
    assert not seen.knows_whole([*WORDS[:35], 1, 2, 3])
    assert not seen.knows([*WORDS[:12], *range(500, 530)])  # only the opening is


def test_short_prompts_are_known_whole_or_not_at_all() -> None:
    seen = Seen()
    seen.add([1, 2, 3])
    assert seen.knows([1, 2, 3])
    assert not seen.knows([1, 2, 4])
    assert not seen.knows([1, 2])
