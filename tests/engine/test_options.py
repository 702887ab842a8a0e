"""Every option of a request, alone and mixed: the slow twin's tokens, whatever a drafter guesses."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from reference.adjust_slow import (
    DEAD,
    Answer,
    encode_bad_words,
    generate_with_options,
    prompt_rows,
)
from reference.drafters import Fake
from reference.tiny_engine import Bench

from forerun import Engine, SamplingParams
from forerun.draft.ngram import NgramDrafter
from forerun.errors import InvalidParameter, InvalidToken, NoTokenPossible
from forerun.types import FinishReason

NUM_COMBINATIONS = 40
CLOSE = 5e-6  # nearer decisions than this may differ between float32 and float64
BASE = SamplingParams(temperature=0, max_tokens=14, seed=11)
WARM = replace(BASE, temperature=1.0)
Z, Q = 89, 80  # the tokens of "z" and "q": they are in no merge, so words of them are easy to write


@dataclass
class Case:
    """A request, what the twin makes of it, and which option it is about."""

    name: str
    prompt: list[int]
    params: SamplingParams
    answer: Answer


class Twin:
    """The slow twin of one tiny model, its answers remembered."""

    def __init__(self, tiny) -> None:
        self.tiny = tiny
        self._known = {}

    def answer(self, prompt, params, **options) -> Answer:
        key = (tuple(prompt), params, *sorted(options.items()))
        if key not in self._known:
            self._known[key] = generate_with_options(
                self.tiny.model, self.tiny.codec, prompt, params, **options
            )
        return self._known[key]

    def case(self, name, prompt, params) -> Case:
        return Case(name, list(prompt), params, self.answer(prompt, params))


# ---- what is asked


def word_of(tiny, prompts, count):
    """Find a word that the answer to a prompt contains as exactly `count` tokens of its own."""
    for index, prompt in enumerate(prompts):
        output = tiny.plain(prompt, BASE).token_ids
        for first in range(1, len(output) - count):
            run = list(output[first : first + count])
            word = tiny.codec.decode(run)
            if tiny.codec.encode(word, add_special=False) == run and len(set(run)) == count:
                return index, word
    raise AssertionError(f"no answer contains a word of {count} tokens")


def late_character(tiny, prompts):
    """Find a character that stands in the answer's first six tokens and in its rest."""
    for index, prompt in enumerate(prompts):
        output = tiny.plain(prompt, BASE).token_ids
        early, late = tiny.codec.decode(output[:6]), tiny.codec.decode(output[7:])
        for character in early:
            if character.isascii() and character in late:
                return index, character
    raise AssertionError("no character comes twice")


def single_options(tiny, prompts):
    """Each option alone: (name, prompts, changed params, the params that it changes)."""
    dice = random.Random(7)
    vocab = range(tiny.vocab_size)
    first, second = (list(tiny.plain(prompts[i], BASE).token_ids) for i in (0, 3))
    one_at, one_word = word_of(tiny, prompts, 1)
    two_at, two_word = word_of(tiny, prompts, 2)
    stops = {"stop_token_ids": (first[2], second[3])}
    late_at, late = late_character(tiny, prompts)
    singles = [
        ("allowed_token_ids", [0, 3], {"allowed_token_ids": dice.sample(vocab, 50)}, {}),
        ("allowed_token_ids", [1], {"allowed_token_ids": [second[0]]}, {}),
        ("banned_token_ids", [0, 3], {"banned_token_ids": [*first[:2], second[1], second[4]]}, {}),
        ("bad_words", [one_at], {"bad_words": one_word}, {}),
        ("bad_words", [two_at], {"bad_words": ["the fox", two_word]}, {}),
        ("min_tokens", [0, 3], {"min_tokens": 8, **stops}, stops),
        ("min_tokens", [late_at], {"min_tokens": 6, "stop": [late]}, {"stop": [late]}),
        ("min_tokens", [0], {"min_tokens": 14, **stops}, stops),
        ("logit_bias", [0, 3], {"logit_bias": {first[0]: -5.0, second[2]: -100, 17: 3.5}}, {}),
        ("logit_bias", [5], {"logit_bias": {40: 100, 41: 99.0}}, {}),
        ("repetition_penalty", [2, 3], {"repetition_penalty": 1.8}, {}),
        ("repetition_penalty", [6, 3], {"repetition_penalty": 0.5}, {}),
        ("frequency_penalty", [2, 3, 7], {"frequency_penalty": 2.0}, {}),
        ("frequency_penalty", [2, 3, 7], {"frequency_penalty": -1.5}, {}),
        ("presence_penalty", [2, 3, 7], {"presence_penalty": 2.0}, {}),
        ("presence_penalty", [2, 3, 7], {"presence_penalty": -2.0}, {}),
    ]
    return [
        (name, index, replace(base, **with_it), replace(base, **without))
        for name, indexes, with_it, without in singles
        for index in indexes
        for base in (BASE, WARM)
    ]


def random_options(dice, tiny, words):
    """Draw a combination of options."""
    vocab = range(tiny.vocab_size)
    given = {"max_tokens": dice.randrange(6, 15), "seed": dice.randrange(2**64)}
    given["temperature"] = dice.choice([0, 0, 0.4, 1.0, 1.7])

    def maybe(chance, **options):
        if dice.random() < chance:
            given.update(options)

    maybe(0.35, allowed_token_ids=dice.sample(vocab, dice.choice([6, 40, 150])))
    maybe(0.4, banned_token_ids=dice.sample(vocab, dice.choice([1, 30, 100])))
    maybe(0.4, bad_words=dice.sample(words, dice.choice([1, 5, 12])))
    maybe(0.4, min_tokens=dice.randrange(given["max_tokens"] + 1))
    maybe(0.4, stop_token_ids=dice.sample(vocab, dice.choice([5, 25])))
    maybe(0.3, stop=dice.sample([*"aeiou st*)(+67=-", "th", "fox"], dice.choice([1, 3])))
    maybe(0.2, ignore_eos=True)
    maybe(0.4, logit_bias={i: dice.uniform(-8, 8) for i in dice.sample(vocab, 20)})
    maybe(0.4, repetition_penalty=dice.choice([0.6, 1.2, 2.5]))
    maybe(0.4, frequency_penalty=dice.choice([-1.0, 0.4, 2.0]))
    maybe(0.4, presence_penalty=dice.choice([-2.0, 0.7, 1.5]))
    maybe(0.2, top_k=dice.choice([1, 5, 30]))
    maybe(0.2, top_p=dice.choice([0.5, 0.9]))
    maybe(0.2, min_p=dice.choice([0.02, 0.2]))
    maybe(0.3, logprobs=dice.choice([0, 3, 20]))
    maybe(0.2, prompt_logprobs=dice.choice([0, 4]))
    maybe(0.3, logprobs_mode="processed")
    return SamplingParams(**given)


def combinations(twin, prompts):
    tiny, dice = twin.tiny, random.Random(20)
    ids = [token for token in range(tiny.vocab_size) if not tiny.codec.is_silent(token)]
    words = [tiny.codec.decode(ids[i : i + 1]) for i in range(len(ids))]
    words = [word for word in words if "\ufffd" not in word]
    words += ["zq", "the fox", "**", "67", "löuft", "好", " and", "((", "th"]
    cases = []
    while len(cases) < NUM_COMBINATIONS:
        prompt = prompts[len(cases) % len(prompts)]
        try:
            params = random_options(dice, tiny, words)
        except InvalidParameter:  # all that is allowed may be banned
            continue
        cases.append(twin.case("combination", prompt, params))
    clear = [case for case in cases if case.answer.closeness > CLOSE]
    assert len(clear) >= NUM_COMBINATIONS - 3
    return clear


@pytest.fixture(scope="module")
def twin(tiny):
    return Twin(tiny)


@pytest.fixture(scope="module")
def repeating_twin(repeating):
    return Twin(repeating)


@pytest.fixture(scope="module")
def cases(twin, prompts):
    """Each option alone, and forty combinations."""
    singles = [
        twin.case(name, prompts[index], params)
        for name, index, params, _ in single_options(twin.tiny, prompts)
    ]
    assert all(case.answer.closeness > CLOSE for case in singles)
    mixed = [*singles, *combinations(twin, prompts)]
    random.Random(3).shuffle(mixed)  # neighbours in a batch are of any kind
    return mixed


@pytest.fixture(scope="module")
def repeating_cases(repeating_twin, prompts):
    """The same on the model whose text repeats itself."""
    singles = [
        repeating_twin.case(name, prompts[index], replace(params, max_tokens=30))
        for name, index, params, _ in single_options(repeating_twin.tiny, prompts)
        if params.temperature == 0
    ]
    mixed = [*singles, *combinations(repeating_twin, prompts)]
    return [case for case in mixed if case.answer.closeness > CLOSE]


# ---- what drafters guess


class Guesser(Fake):
    """Know every request's answer by its id, and guess by one of the kinds below."""

    def __init__(self, tiny, cases, kind) -> None:
        self.tiny, self.cases, self.kind = tiny, cases, kind
        self.forbidden = [self._forbidden(case) for case in cases]

    def _forbidden(self, case) -> list[int]:
        params, vocab = case.params, self.tiny.vocab_size
        banned = [*params.banned_token_ids, *params.stop_token_ids]
        banned += self.tiny.model.config["eos_token_id"]
        banned += [t for w in encode_bad_words(self.tiny.codec, params.bad_word_strings) for t in w]
        banned += [token for token, bias in params.bias_pairs if bias < 0]
        if params.allowed_token_ids is not None:
            banned += sorted(set(range(vocab)) - set(params.allowed_token_ids))[:5]
        return banned

    def guess(self, request):
        case = self.cases[request.request_id]
        answer = [*case.prompt, *case.answer.token_ids]
        length = len(request.tokens)
        assert answer[:length] == list(request.tokens), "left the plain path"
        future = [*answer[length:], *range(40, 60)]
        kinds = ["right", "wrong", "mixed", "forbidden", "repeats"]
        kind = kinds[length % len(kinds)] if self.kind == "turns" else self.kind
        return getattr(self, f"_{kind}")(request, future)[: request.max_draft]

    def _right(self, request, future):
        return future

    def _wrong(self, request, future):
        return [(token + 1) % self.tiny.vocab_size for token in future]

    def _mixed(self, request, future):
        return [*future[:2], (future[2] + 1) % self.tiny.vocab_size, *future[3:]]

    def _forbidden_after(self, request, future, count):
        banned = self.forbidden[request.request_id]
        turn = len(request.tokens) % len(banned)
        return [*future[:count], *banned[turn:], *banned[:turn]]

    def _forbidden(self, request, future=None):
        raise NotImplementedError

    def _repeats(self, request, future):
        """A right token, then what the text already holds, over and over."""
        last = list(request.tokens)[-1:]
        return [*future[:1], *(future[:1] * 2), *last * 3, *list(request.tokens)[-4:] * 4]
