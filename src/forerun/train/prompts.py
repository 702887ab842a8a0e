"""Prompts: written by the model itself as a user would, or made of what it answered before.

A chat model is shown an opened user turn with the first words of a request and goes on as the
user. Some prompts ask about a text that it wrote earlier, some follow up an earlier answer.
Everything is drawn from (seed, id of the prompt), so a run that goes on writes the same prompts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine.engine import Engine, GenerationResult
from ..errors import InvalidLogits, TemplateError
from ..params import SamplingParams
from ..text import TextCodec
from .rows import Row
from .screen import end_whole
from .topics import ABOUT_TEXT, BEGINNINGS, FILLINGS, FOLLOW_UPS, TOPICS, Topic

__all__ = ["Earlier", "Prompt", "UserTurn", "dice_for", "open_user_turn", "write_prompts"]

MARK = "forerunmarkerword"  # plain letters: no template trims or escapes them
ABOUT_TEXT_SHARE = 0.2
FOLLOW_UP_SHARE = 0.12
MISSPELT_SHARE = 0.1  # of the words of a text that is to be corrected
MIN_TEXT_CHARS, MAX_TEXT_CHARS = 120, 700
MAX_HISTORY = 450  # tokens of a conversation that is followed up


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be answered."""

    id: int
    token_ids: tuple[int, ...]
    content: str  # what the user says last, or the plain text
    messages: tuple[Mapping[str, Any], ...]  # () for plain text
    topic: str
    source: str


@dataclass(frozen=True, slots=True)
class UserTurn:
    """How a chat template opens a user's turn, and what ends it."""

    head: str
    stop_ids: tuple[int, ...]
    stop: str  # "" where a token ends it


def open_user_turn(codec: TextCodec) -> UserTurn | None:
    """Cut a rendered conversation where the user's words begin; None without a template."""
    if not codec.chat_source:
        return None
    messages = [{"role": "user", "content": MARK}]
    text = codec.chat_template.render(messages, add_generation_prompt=False)
    if text.count(MARK) != 1:
        raise TemplateError(
            f"the chat template shows a user's message {text.count(MARK)} times instead of once; "
            "the model cannot write prompts with it: give conversations of your own"
        )
    head, tail = text.split(MARK)
    ids = codec.encode(tail, add_special=False)
    special = tuple(token for token in ids[:4] if token in codec.special_ids)[:1]
    return UserTurn(head, special, "" if special else tail.strip())


@dataclass(slots=True)
class Earlier:
    """What earlier answers are good for: texts to ask about, conversations to go on with."""

    texts: list[str] = field(default_factory=list)
    conversations: list[tuple[Mapping[str, Any], ...]] = field(default_factory=list)

    def add(self, row: Row, codec: TextCodec) -> None:
        if row.finish != "stop" or not row.messages:
            return
        text = codec.decode(row.answer_ids).strip()
        if MIN_TEXT_CHARS <= len(text) <= MAX_TEXT_CHARS:
            self.texts.append(text)
        if text and len(row.prompt_ids) + len(row.answer_ids) <= MAX_HISTORY:
            answer = {"role": "assistant", "content": text}
            self.conversations.append((*row.messages, answer))


def dice_for(seed: int, row_id: int, purpose: str) -> random.Random:
    """Make the chance of one decision: the same in every run and process."""
    return random.Random(f"{seed}/{row_id}/{purpose}")


def write_prompts(
    engine: Engine,
    ids: Sequence[int],
    *,
    seed: int,
    earlier: Earlier,
    temperature: float = 0.8,
    top_p: float = 0.95,
    max_tokens: int = 120,
) -> list[Prompt]:
    """Write the prompts of these ids, in one batch; what came out badly is not in the list."""
    codec = engine.codec
    turn = open_user_turn(codec)
    made = {row_id: _from_earlier(codec, row_id, seed, earlier) for row_id in ids}
    openings = {
        row_id: _opening(seed, row_id, TOPICS if turn else BEGINNINGS)
        for row_id, prompt in made.items()
        if prompt is None
    }
    params = [
        SamplingParams(
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens if turn else max(max_tokens // 3, 1),  # the rest is the answer
            seed=dice_for(seed, row_id, "prompt").getrandbits(63),
            stop_token_ids=turn.stop_ids if turn else (),
            stop=turn.stop if turn and turn.stop else (),
        )
        for row_id in openings
    ]
    results = engine.generate(
        [_encode_opening(codec, turn, opening) for _, opening in openings.values()], params
    )
    for (row_id, (topic, opening)), result in zip(openings.items(), results, strict=True):
        if isinstance(result.error, InvalidLogits):
            continue  # one bad prompt must not end a run of hours
        if result.error is not None:
            raise result.error
        text = opening + result.text
        if turn is None:
            token_ids = (*result.prompt_token_ids, *_without_end(result))
            made[row_id] = Prompt(row_id, token_ids, text, (), topic.name, "written")
        else:
            content = _tidy(text, cut_short=result.finish_reason == "length")
            made[row_id] = _chat_prompt(codec, row_id, (), content, topic.name, "written")
    return [prompt for prompt in made.values() if prompt is not None]


def _encode_opening(codec: TextCodec, turn: UserTurn | None, opening: str) -> list[int]:
    if turn is None:
        return codec.encode(opening)
    return codec.encode(turn.head + opening, add_special=False)


def _without_end(result: GenerationResult) -> tuple[int, ...]:
    return result.token_ids[:-1] if isinstance(result.stopped_by, int) else result.token_ids


def _tidy(text: str, *, cut_short: bool) -> str:
    """End a request as a person would send it."""
    text = text.strip()
    if cut_short:
        text = end_whole(text)
    return text + "\n```" if text.count("```") % 2 else text


def _chat_prompt(
    codec: TextCodec,
    row_id: int,
    history: Sequence[Mapping[str, Any]],
    content: str,
    topic: str,
    source: str,
) -> Prompt:
    messages = (*history, {"role": "user", "content": content})
    return Prompt(row_id, tuple(codec.encode_chat(messages)), content, messages, topic, source)


def _from_earlier(codec: TextCodec, row_id: int, seed: int, earlier: Earlier) -> Prompt | None:
    """Make the prompts of some ids from earlier answers; None: the model is to write it."""
    dice = dice_for(seed, row_id, "kind")
    kind = dice.random()
    if kind < FOLLOW_UP_SHARE and earlier.conversations:
        topic, words = _draw(dice, FOLLOW_UPS)
        history = dice.choice(earlier.conversations)
        return _chat_prompt(codec, row_id, history, words, topic.name, "follow_up")
    if kind > 1 - ABOUT_TEXT_SHARE and earlier.texts:
        topic, words = _draw(dice, ABOUT_TEXT)
        text = dice.choice(earlier.texts)
        if topic.name == "correct":
            text = _misspell(text, dice)
        return _chat_prompt(codec, row_id, (), f"{words}\n\n{text}", topic.name, "about_text")
    return None


def _opening(seed: int, row_id: int, topics: Sequence[Topic]) -> tuple[Topic, str]:
    return _draw(dice_for(seed, row_id, "opening"), topics)


def _draw(dice: random.Random, topics: Sequence[Topic]) -> tuple[Topic, str]:
    topic = dice.choice(topics)
    words = dice.choice(topic.openings)
    return topic, re.sub(r"\{(\w+)\}", lambda match: dice.choice(FILLINGS[match[1]]), words)


def _misspell(text: str, dice: random.Random) -> str:
    """Swap two letters in some of the words."""
    words = text.split(" ")
    for index, word in enumerate(words):
        if len(word) > 3 and word.isalpha() and dice.random() < MISSPELT_SHARE:
            at = dice.randrange(1, len(word) - 1)
            words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)
