"""The tables of topics are whole: many, named once, with openings whose gaps can be filled."""

from __future__ import annotations

import re

import pytest

from forerun.train.topics import ABOUT_TEXT, BEGINNINGS, FILLINGS, FOLLOW_UPS, TOPICS

TABLES = [TOPICS, ABOUT_TEXT, FOLLOW_UPS, BEGINNINGS]


@pytest.mark.parametrize("table", TABLES)
def test_openings_are_there_once_and_can_be_filled(table) -> None:
    names = [topic.name for topic in table]
    openings = [opening for topic in table for opening in topic.openings]
    assert len(set(names)) == len(names)
    assert len(set(openings)) == len(openings)
    assert all(opening.strip() for opening in openings)
    assert not any("|" in opening for opening in openings)
    assert {name for each in openings for name in re.findall(r"\{(\w+)\}", each)} <= set(FILLINGS)


def test_there_are_many_topics() -> None:
    assert len(TOPICS) >= 60
    assert all(len(words) >= 10 for words in FILLINGS.values())


def test_lines_are_read_as_they_are_meant() -> None:
    by_name = {topic.name: topic.openings for topic in TOPICS}
    assert by_name["algorithm"] == (
        "Implement an algorithm that",
        "Write a {code} program that finds",
        "Explain how the algorithm for",
    )
    assert by_name["code explanation"][0] == "Explain what this {code} code does:\n\n```"
    assert by_name["role play"][0] == "You are {person}."
