"""Prompts of mixed kinds, from a small generator: some repeat themselves, some never do."""

from __future__ import annotations

import random

NAMES = ["Alice", "Bruno", "Chen", "Divya", "Elif", "Farid", "Greta", "Hiro"]
THINGS = ["lamp", "river", "engine", "garden", "letter", "bridge", "clock", "mountain"]
VERBS = ["carries", "paints", "repairs", "forgets", "studies", "hides", "sells", "counts"]
FOREIGN = [
    "Der Zug fährt über die Brücke. Translate this into English:",
    "El gato duerme sobre la mesa roja. Continue the story in Spanish:",
    "今天天气很好。我们去公园。请继续。",
    "Привет! Как дела? Расскажи о себе:",  # noqa: RUF001
    "Le petit chat boit du lait chaque matin. Réécris la phrase :",
]


def sentence(dice: random.Random) -> str:
    return f"{dice.choice(NAMES)} {dice.choice(VERBS)} the {dice.choice(THINGS)}."


def edit(dice: random.Random) -> str:
    text = " ".join(sentence(dice) for _ in range(dice.randrange(4, 9)))
    old, new = dice.sample(NAMES, 2)
    return f"Replace {old} by {new} in this text and change nothing else.\n\n{text}\n\nResult:\n"


def listing(dice: random.Random) -> str:
    rows = [f"{i}. {dice.choice(NAMES)}: {dice.randrange(10, 99)} points" for i in range(1, 6)]
    return "The ranking:\n" + "\n".join(rows) + "\n6."


def code(dice: random.Random) -> str:
    name = dice.choice(THINGS)
    return (
        f"class {name.title()}:\n    def __init__(self, size):\n        self.size = size\n\n"
        f"    def get_size(self):\n        return self.size\n\n    def set_{name}(self, {name}):\n"
    )


def prose(dice: random.Random) -> str:
    return f"Write a short story about {dice.choice(NAMES)} and a {dice.choice(THINGS)}."


def repetition(dice: random.Random) -> str:
    words = dice.sample(THINGS, 3)
    return " ".join(words * dice.randrange(3, 8)) + " " + words[0]


def foreign(dice: random.Random) -> str:
    return f"{dice.choice(FOREIGN)} {dice.randrange(100)}"


KINDS = (edit, listing, code, prose, repetition, foreign)


def mixed_prompts(count: int, seed: int = 0) -> list[str]:
    """Make `count` prompts, the kinds in turn."""
    dice = random.Random(seed)
    return [KINDS[index % len(KINDS)](dice) for index in range(count)]
