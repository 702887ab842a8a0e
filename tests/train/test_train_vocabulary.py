"""The draft vocabulary: what must be in, what is frequent, in rising order."""

from __future__ import annotations

import dataclasses

import pytest
from train_tools import random_rows

from forerun.errors import ConfigError
from forerun.train.vocabulary import choose_draft_ids, coverage, single_bytes


def rows_of(*answers: tuple[int, ...]):
    return [
        dataclasses.replace(row, answer_ids=answer)
        for row, answer in zip(random_rows(len(answers)), answers, strict=True)
    ]


def test_the_most_frequent_tokens_and_those_that_must_be_are_chosen() -> None:
    rows = rows_of((30, 30, 30, 40, 40), (50, 40, 60))
    ids = choose_draft_ids(rows, 4, 100, always=[7, 99])
    assert ids is not None
    assert ids.tolist() == [7, 30, 40, 99]
    assert coverage(rows, ids) == 6 / 8


def test_what_the_answers_do_not_fill_is_filled_from_below() -> None:
    ids = choose_draft_ids(rows_of((30,)), 5, 100, always=[1])
    assert ids is not None
    assert ids.tolist() == [0, 1, 2, 3, 30]


def test_all_tokens_need_no_list() -> None:
    assert choose_draft_ids(rows_of((3,)), 100, 100, always=[]) is None
    assert coverage(rows_of((3,)), None) == 1.0


@pytest.mark.parametrize("size", [0, 2, 101])
def test_sizes_that_cannot_be_are_refused_with_those_that_can(size: int) -> None:
    with pytest.raises(ConfigError, match=r"ask for 3\.\.100"):
        choose_draft_ids(rows_of((3,)), size, 100, always=[1, 2, 3])


def test_bytes_are_known_in_both_spellings() -> None:
    tokens = {"a": 5, "\u0120": 6, "ab": 7, "<0x0A>": 8, "\u4f60": 9, "<start>": 10}
    assert single_bytes(tokens) == [5, 6, 8]
