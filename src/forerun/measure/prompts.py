"""Prompts to measure with: four kinds of our own, or those of a file.

Ours go from a text that is copied almost whole to one with nothing to copy.

They are written for a model of 135M parameters, which edits a text only if it has seen how.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

__all__ = ["DEMO_PROMPTS", "DemoPrompt", "read_prompts"]

NOTES = """\
Notes from the weekly meeting

Anna reported that the new garden gate is finished and that the paint will dry by Sunday. Anna \
thanked the two neighbours who carried the wood up the hill.

The old shed needs a new roof before the winter. Anna asked three firms for an offer and will \
bring the answers to the next meeting. Until then nobody should keep tools in the shed, since the \
rain comes in at the back.

The apple trees carry more fruit than last year. Everybody may pick as much as one basket holds. \
What is left over on the last day of September goes to the school kitchen in Mill Lane.

The next meeting is on the first Tuesday of October at seven in the evening, in the room above \
the bakery."""

EXAMPLE = """\
Lena opened the shop at eight. She swept the floor, put the bread on the shelf and wrote the \
prices on the board."""

CORRECT = "Correct the spelling in this text and return the whole text:"


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A chat that awaits its answer."""

    title: str
    messages: tuple[dict[str, str], ...]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _misspelt(text: str) -> str:
    """Put in three mistakes that even a small model corrects."""
    for right, wrong in (("finished", "finishd"), ("asked", "askd"), ("school", "scool")):
        text = text.replace(right, wrong)
    return text


DEMO_PROMPTS = (
    DemoPrompt(
        "edit",
        (
            _user(f"{CORRECT}\n\n{EXAMPLE.replace('opened', 'opend')}"),
            {"role": "assistant", "content": EXAMPLE},
            _user(f"{CORRECT}\n\n{_misspelt(NOTES)}"),
        ),
    ),
    DemoPrompt(
        "code",
        (
            _user(
                "Write a Python class Stack with the methods push, pop, peek and is_empty. Then "
                "write a class Queue with the methods enqueue, dequeue, peek and is_empty."
            ),
        ),
    ),
    DemoPrompt("summary", (_user(f"Summarize these notes in three sentences.\n\n{NOTES}"),)),
    DemoPrompt(
        "open prose",
        (
            _user(
                "Write a short story about a lighthouse keeper who finds a letter in a bottle on a "
                "winter morning."
            ),
        ),
    ),
)


def read_prompts(path: Path, limit: int | None = None) -> list[DemoPrompt]:
    """Read JSON lines with "prompt" or "turns" (the first is used), at most `limit` per category.

    Raises:
        ConfigError: a line that is no such object, with its number.
    """
    prompts: list[DemoPrompt] = []
    seen: Counter[str] = Counter()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            text = entry["prompt"] if "prompt" in entry else entry["turns"][0]
            title = str(entry.get("category", "prompt"))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f'{path}, line {number}: expected an object with "prompt" or "turns" '
                f"({type(error).__name__}: {error})"
            ) from None
        if limit is None or seen[title] < limit:
            prompts.append(DemoPrompt(title, (_user(text),)))
        seen[title] += 1
    return prompts
