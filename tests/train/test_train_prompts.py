"""Prompts that the model writes, and what earlier answers are good for."""

from __future__ import annotations

import pytest

from forerun.errors import TemplateError
from forerun.params import SamplingParams
from forerun.train.answers import answer_prompts, choose_temperature
from forerun.train.prompts import Earlier, open_user_turn, write_prompts
from forerun.train.rows import Row
from forerun.train.screen import is_loop


class Codec:
    """As much of a codec as opening a turn needs."""

    def __init__(self, before: str, after: str, special: dict[str, int]) -> None:
        self.chat_source = "a template"
        self.chat_template = self
        self._before, self._after, self._special = before, after, special
        self.special_ids = frozenset(special.values())

    def render(self, messages, **_) -> str:
        return self._before + messages[0]["content"] + self._after

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        assert not add_special
        return [number for name, number in self._special.items() if name in text] or [1000]


def test_a_turn_ends_with_its_special_token() -> None:
    turn = open_user_turn(Codec("<|start|>user\n", "<|end|>\n", {"<|end|>": 7}))
    assert (turn.head, turn.stop_ids, turn.stop) == ("<|start|>user\n", (7,), "")


def test_or_else_with_its_text() -> None:
    turn = open_user_turn(Codec("[INST] ", " [/INST]", {}))
    assert (turn.head, turn.stop_ids, turn.stop) == ("[INST] ", (), "[/INST]")


def test_a_template_that_hides_what_users_say_is_refused() -> None:
    class Deaf(Codec):
        def render(self, messages, **_) -> str:
            return "nothing of it"

    with pytest.raises(TemplateError, match="0 times"):
        open_user_turn(Deaf("", "", {}))


def test_the_opened_turn_of_a_real_template(engine, plain_engine) -> None:
    turn = open_user_turn(engine.codec)
    assert turn.head == "<|start|>user\n"
    assert turn.stop_ids == (engine.codec.special_tokens["<|end|>"],)
    assert open_user_turn(plain_engine.codec) is None


def test_prompts_depend_on_seed_and_id_alone(engine) -> None:
    def write(ids, seed=0):
        made = write_prompts(engine, ids, seed=seed, earlier=Earlier(), max_tokens=16)
        return {prompt.id: prompt for prompt in made}

    together = write(range(12))
    assert len({prompt.content for prompt in together.values()}) > 3
    assert write([7]) == {7: together[7]}
    assert write(range(5, 9)) == {row_id: together[row_id] for row_id in range(5, 9)}
    assert write([7], seed=1)[7] != together[7]


def test_models_without_a_template_go_on_with_texts(plain_engine) -> None:
    made = write_prompts(plain_engine, range(8), seed=0, earlier=Earlier(), max_tokens=24)
    assert {prompt.id for prompt in made} == set(range(8))
    assert all(prompt.messages == () for prompt in made)
    for prompt in made:
        assert plain_engine.codec.decode(prompt.token_ids) == prompt.content


def earlier_row(text: str, codec, finish: str = "stop") -> Row:
    messages = ({"role": "user", "content": "Say it."},)
    ids = (*codec.encode(text, add_special=False), codec.special_tokens["<|end|>"])
    prompt = tuple(codec.encode_chat(messages))
    return Row(0, prompt, ids, 0.0, 0, "poem", "written", finish, messages)


def test_earlier_answers_are_asked_about_and_followed_up(engine) -> None:
    text = "the fox and the dog sit under the old tree. " * 4
    earlier = Earlier()
    earlier.add(earlier_row(text, engine.codec), engine.codec)
    earlier.add(earlier_row("cut " * 40, engine.codec, finish="length"), engine.codec)
    made = write_prompts(engine, range(60), seed=0, earlier=earlier, max_tokens=2)
    about = [prompt for prompt in made if prompt.source == "about_text"]
    after = [prompt for prompt in made if prompt.source == "follow_up"]
    assert about
    assert after
    assert len(about) + len(after) < 40, "most are still written"
    for prompt in about:
        if prompt.topic != "correct":  # which misspells it
            assert prompt.content.endswith("\n\n" + text.strip())
        assert len(prompt.messages) == 1
    for prompt in after:
        roles = [message["role"] for message in prompt.messages]
        assert roles == ["user", "assistant", "user"]
        assert prompt.messages[1]["content"] == text.strip()
        assert prompt.token_ids == tuple(engine.codec.encode_chat(prompt.messages))


def test_answers_are_the_targets_own(engine) -> None:
    prompts = write_prompts(engine, range(20), seed=0, earlier=Earlier(), max_tokens=16)
    rows = answer_prompts(engine, prompts, seed=0, top_p=0.9, max_tokens=40)
    assert [row.id for row in rows] == [prompt.id for prompt in prompts]
    for row in rows:
        params = SamplingParams(
            temperature=row.temperature, top_p=0.9, max_tokens=40, seed=row.seed
        )
        [result] = engine.generate([list(row.prompt_ids)], params)
        if row.finish == "loop":
            assert row.answer_ids == result.token_ids[: len(row.answer_ids)]
        else:
            assert (row.answer_ids, row.finish) == (result.token_ids, result.finish_reason)


def test_answers_that_go_in_circles_are_cut(repeating) -> None:
    from forerun import Engine

    with Engine.from_pretrained(
        str(repeating.folder), drafter="none", dtype="float32", num_threads=1,
        max_model_len=512, kv_cache_tokens=8192,
    ) as engine:  # fmt: skip
        prompts = write_prompts(engine, range(24), seed=0, earlier=Earlier(), max_tokens=12)
        rows = answer_prompts(engine, prompts, seed=0, max_tokens=120)
    loops = [row for row in rows if row.finish == "loop"]
    assert loops
    for row in loops:
        ends = [end for end in range(len(row.answer_ids) + 1) if is_loop(row.answer_ids, end)]
        assert ends == [len(row.answer_ids)]


def test_half_of_the_answers_are_greedy() -> None:
    drawn = [choose_temperature(3, row_id) for row_id in range(2000)]
    assert 900 < drawn.count(0.0) < 1100
    assert set(drawn) == {0.0, 0.7, 0.8, 0.9, 1.0}
