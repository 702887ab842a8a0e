"""The certificate's own prompts: sixty-four, from text to copy to text with nothing to copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CERTIFY_PROMPTS", "LOOP_TEXT"]

TOPICS = (
    "a lighthouse in winter",
    "how bread rises",
    "the moons of Jupiter",
    "repairing a bicycle chain",
    "a market in Marrakesh",
    "prime numbers",
    "learning to swim late in life",
    "the history of paper",
)
LINE = "Anna carried the wood up the hill, and Anna thanked the two neighbours who carried the rest"
TASKS = (
    "Write three sentences about {topic}.",
    "List five facts about {topic}, numbered 1 to 5.",
    "Repeat this line exactly, twice: notes on {topic}; notes on {topic}; more notes on {topic}.",
    f"Correct the spelling and return the whole text: {LINE}. The subjct is {{topic}}.",
    "Write a Python function that prints a table about {topic}, row by row.",
    "Write a dialogue between two friends about {topic}. Begin each line with a name.",
    "Translate into French: We talked about {topic} until the rain stopped.",
    'Give a JSON object with the keys "title", "topic" and "length" for an essay about {topic}.',
)

CERTIFY_PROMPTS: tuple[tuple[Mapping[str, Any], ...], ...] = tuple(
    ({"role": "user", "content": task.format(topic=topic)},) for topic in TOPICS for task in TASKS
)

# Continued many times for statistics: what comes next is often, not always, what came before.
LOOP_TEXT = (
    "red, blue, green, red, blue, yellow, red, blue, green, red, white, green, red, blue, yellow, "
    "red, blue,"
)
