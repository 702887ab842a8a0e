"""Every option of a request, alone and mixed: the twin's tokens, whatever a drafter guesses."""

from __future__ import annotations

import asyncio
import itertools
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
WOBBLE = 1e-4  # of a logit, between two ways to compute the same float32 model (2e-5 are usual)
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
    words = [word for word in words if "\ufffd" not in word and word.strip()]
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
    clear = [case for case in singles if case.answer.closeness > CLOSE]
    assert len(clear) >= len(singles) - 2
    mixed = [*clear, *combinations(twin, prompts)]
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
        self.unwanted = [self._unwanted_by(case) for case in cases]

    def _unwanted_by(self, case) -> list[int]:
        """List tokens that the request's options ban, end it with or make less likely."""
        params, vocab = case.params, self.tiny.vocab_size
        words = encode_bad_words(self.tiny.codec, params.bad_word_strings)
        tokens = [*params.banned_token_ids, *params.stop_token_ids]
        tokens += self.tiny.model.config["eos_token_id"]
        tokens += [token for word in words for token in word]
        tokens += [token for token, bias in params.bias_pairs if bias < 0]
        if params.allowed_token_ids is not None:
            tokens += sorted(set(range(vocab)) - set(params.allowed_token_ids))[:5]
        return tokens

    def guess(self, request):
        case = self.cases[request.request_id]
        answer = [*case.prompt, *case.answer.token_ids]
        length = len(request.tokens)
        assert answer[:length] == list(request.tokens), "left the plain path"
        future = [*answer[length:], *range(40, 60)]
        kind = KINDS[length % len(KINDS)] if self.kind == "turns" else self.kind
        return getattr(self, kind)(request, future)[: request.max_draft]

    def right(self, request, future):
        return future

    def wrong(self, request, future):
        return [(token + 1) % self.tiny.vocab_size for token in future]

    def mixed(self, request, future):
        return [*future[:2], (future[2] + 1) % self.tiny.vocab_size, *future[3:]]

    def unwanted_tokens(self, request, future):
        """Some right ones, then what the options ban, the whole words of bad_words among it."""
        tokens = self.unwanted[request.request_id]
        turn = len(request.tokens) % len(tokens)
        return [*future[: len(request.tokens) % 4], *tokens[turn:], *tokens[:turn]]

    def repeats(self, request, future):
        """A right token, then what the text already holds, over and over."""
        known = list(request.tokens)
        return [*future[:1] * 3, *known[-1:] * 3, *known[-4:] * 4]


KINDS = ("right", "wrong", "mixed", "unwanted_tokens", "repeats")


# ---- running and comparing


def run(tiny, cases, drafter=None, **options):
    """Answer all cases in one bench, whose ids are the cases' indexes."""
    bench = Bench(tiny.folder, drafter, **options)
    return bench.generate([case.prompt for case in cases], [case.params for case in cases])


def totals(generated):
    count = Counter()
    for each in generated:
        for name in ("num_drafted", "num_accepted", "num_preemptions", "num_steps"):
            count[name] += getattr(each.stats, name)
    return count


def assert_answers(generated, cases):
    for each, case in zip(generated, cases, strict=True):
        want, about = case.answer, f"{case.name}: {case.params}"
        assert each.token_ids == want.token_ids, about
        assert each.text == want.text, about
        assert each.finish_reason == want.finish_reason, about
        assert isinstance(each.error, NoTokenPossible) == (want.finish_reason == "error"), about
        assert_logprobs(logprobs_of(each), case.params, want.rows(case.params.logprobs_mode))
        if case.params.prompt_logprobs is not None and case.params.logprobs_mode == "raw":
            assert len(each.request.prompt_logprobs) == len(case.prompt) - 1, about


def logprobs_of(each):
    """Join the events' log-probabilities; None where no event has any."""
    parts = [event.logprobs for event in each.events if event.logprobs is not None]
    for event in each.events:
        if event.logprobs is not None:
            assert [one.token_id for one in event.logprobs] == list(event.token_ids)
    return [one for part in parts for one in part]


def assert_logprobs(found, params, rows):
    if params.logprobs is None:
        assert found == []
        return
    assert len(found) == len(rows)
    for one, row in zip(found, rows, strict=True):
        assert_logprob(one, row, params.logprobs)


def assert_logprob(one, row, count):
    """One token's log-probability, its rank and the likeliest against the twin's row."""
    own = row[one.token_id]
    assert_near(one.logprob, own)
    slack = WOBBLE + rounding(own)
    assert sum(x > own + slack for x in row) < one.rank <= 1 + sum(x > own - slack for x in row)
    best = sorted((x for x in row if x > DEAD), reverse=True)[:count]
    certain = [x for x in best if x > -28 or max(row) < -1]  # below, whole weights may be 0
    assert len(certain) <= len(one.top) <= len(best)
    for (token, value), x in zip(one.top, best, strict=False):
        assert_near(value, x)
        assert_near(value, row[token])
    assert len({token for token, _ in one.top}) == len(one.top)
    values = [x for _, x in one.top]
    assert values == sorted(values, reverse=True)


def rounding(x):
    """What a whole weight of at most 2^42 can do to the logarithm x of a probability."""
    return 4 * 2.0**-42 * math.exp(-x)


def assert_near(value, x):
    assert value == pytest.approx(x, abs=WOBBLE + rounding(x))


# ---- tokens


def test_every_option_changes_some_answer(tiny, twin, prompts):
    """What the equalities below compare is not what plain decoding would say anyway."""
    changed = Counter()
    for name, index, params, without in single_options(tiny, prompts):
        with_it, plain = (twin.answer(prompts[index], each) for each in (params, without))
        changed[name, params.temperature] += with_it.token_ids != plain.token_ids
    names = {name for name, *_ in single_options(tiny, prompts)}
    assert len(names) == 8
    assert all(changed[name, 0] and changed[name, 1] for name in names), changed


def test_the_combinations_are_mixed(cases, repeating_cases):
    for mixed in (cases, repeating_cases):
        reasons = Counter(case.answer.finish_reason for case in mixed)
        assert reasons["stop"] >= 5
        assert reasons["length"] >= 20
        assert sum(len(case.answer.token_ids) for case in mixed) > 8 * len(mixed)


def test_plain_decoding(tiny, cases):
    generated = run(tiny, cases)
    assert_answers(generated, cases)
    assert totals(generated)["num_drafted"] == 0


def test_plain_decoding_alone(tiny, cases):
    for case in cases[::9]:
        assert_answers(run(tiny, [case]), [case])


@pytest.mark.parametrize("max_draft", [1, 3, 7, 15])
def test_drafts_of_every_length(tiny, cases, max_draft):
    generated = run(tiny, cases, Guesser(tiny, cases, "turns"), max_draft=max_draft)
    assert_answers(generated, cases)
    assert 0 < totals(generated)["num_accepted"] < totals(generated)["num_drafted"]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_every_kind(tiny, cases, kind):
    generated = run(tiny, cases, Guesser(tiny, cases, kind), max_draft=7)
    assert_answers(generated, cases)
    count = totals(generated)
    assert count["num_drafted"] > 200
    assert (count["num_accepted"] == 0) == (kind == "wrong")
    if kind == "right":
        assert count["num_accepted"] > 0.8 * sum(len(case.answer.token_ids) for case in cases)
    else:
        assert count["num_accepted"] < count["num_drafted"]


def test_the_ngram_drafter(repeating, repeating_cases):
    generated = run(repeating, repeating_cases, NgramDrafter(1, 4), max_draft=7)
    assert_answers(generated, repeating_cases)
    count = totals(generated)
    assert 0 < count["num_accepted"] < count["num_drafted"]


@pytest.mark.parametrize("max_draft", [0, 1, 3, 15])
def test_guesses_on_the_repeating_model(repeating, repeating_cases, max_draft):
    drafter = Guesser(repeating, repeating_cases, "turns")
    generated = run(repeating, repeating_cases, drafter, max_draft=max_draft)
    assert_answers(generated, repeating_cases)
    assert (totals(generated)["num_accepted"] > 0) == (max_draft > 0)


@pytest.mark.parametrize("kind", ["turns", "right", "unwanted_tokens"])
def test_preemption(tiny, cases, kind):
    """A third of the blocks that the running requests want, and pieces of prompts."""
    some = cases[::2]
    generated = run(
        tiny, some, Guesser(tiny, some, kind), max_draft=7,
        cache_blocks=16, max_model_len=128, max_num_batched_tokens=20, max_num_seqs=8,
    )  # fmt: skip
    assert_answers(generated, some)
    count = totals(generated)
    assert count["num_preemptions"] > 5
    assert 0 < count["num_accepted"] < count["num_drafted"]


@pytest.mark.parametrize(("tokens", "seqs"), [(1, 1), (5, 3)])
def test_tiny_token_budgets(tiny, cases, tokens, seqs):
    some = cases[1::5]
    generated = run(
        tiny, some, Guesser(tiny, some, "turns"), max_draft=7,
        max_num_batched_tokens=tokens, max_num_seqs=seqs,
    )  # fmt: skip
    assert_answers(generated, some)
    assert (totals(generated)["num_accepted"] > 0) == (tokens > 1)


def test_compiled_kernels(tiny_compiled, prompts):
    """The other path of attention and draws, and a batch of one option beside plain requests."""
    twin = Twin(tiny_compiled)
    mixed = [
        twin.case("combination", case.prompt, case.params)
        for case in combinations(twin, prompts)[:16]
    ]
    mixed += [twin.case("plain", prompt, replace(WARM, top_k=0)) for prompt in prompts[:4]]
    for drafter in (None, Guesser(tiny_compiled, mixed, "turns")):
        generated = run(tiny_compiled, mixed, drafter, kernels="auto")
        assert_answers(generated, mixed)
        assert (totals(generated)["num_accepted"] > 0) == (drafter is not None)


# ---- stops and min_tokens inside drafted blocks


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("max_draft", [0, 3, 15])
def test_min_tokens_and_stop_tokens_in_a_block(tiny, twin, prompts, temperature, max_draft):
    """A stop token is guessed too early, on time and late; each ends the answer just where due."""
    params = replace(BASE, temperature=temperature, max_tokens=20)
    mixed = []
    for prompt in prompts[:4]:
        stops = twin.answer(prompt, params).token_ids[3::4]
        own = replace(params, stop_token_ids=stops)
        mixed += [
            twin.case("min_tokens", prompt, replace(own, min_tokens=count))
            for count in (0, 1, 3, 4, 8, 15, 20)
        ]
    drafter = Guesser(tiny, mixed, "unwanted_tokens")
    generated = run(tiny, mixed, drafter, max_draft=max_draft)
    assert_answers(generated, mixed)
    for case in mixed:
        stops = set(case.params.stop_token_ids)
        assert not stops & set(case.answer.token_ids[: case.params.min_tokens])
    assert {case.answer.finish_reason for case in mixed} == {"stop", "length"}
    assert_answers(run(tiny, mixed, Guesser(tiny, mixed, "right"), max_draft=15), mixed)


@pytest.mark.parametrize("kind", ["right", "mixed"])
@pytest.mark.parametrize("max_draft", [0, 1, 15])
def test_min_tokens_and_stop_strings_in_a_block(tiny, twin, prompts, kind, max_draft):
    index, late = late_character(tiny, prompts)
    output = twin.answer(prompts[index], BASE).token_ids
    first = next(i for i in range(14) if late in tiny.codec.decode(output[: i + 1]))
    mixed = [
        twin.case("stop", prompts[index], replace(BASE, stop=late, min_tokens=count))
        for count in range(15)
    ]
    lengths = [len(case.answer.token_ids) for case in mixed]
    assert lengths[: first + 1] == [first + 1] * (first + 1)
    assert first + 1 < lengths[first + 1] <= 14
    assert late in mixed[first + 1].answer.text
    assert lengths == sorted(lengths)
    generated = run(tiny, mixed, Guesser(tiny, mixed, kind), max_draft=max_draft)
    assert_answers(generated, mixed)
    assert (totals(generated)["num_accepted"] > 0) == (max_draft > 0)


def test_min_tokens_keeps_end_of_text_away(tiny, twin, prompts):
    """End-of-text is biased to be all that is said; until min_tokens it cannot be."""
    (end,) = tiny.model.config["eos_token_id"]
    keen = replace(BASE, logit_bias={end: 100}, max_tokens=10)
    mixed = [
        twin.case("min_tokens", prompt, replace(keen, min_tokens=count, temperature=temperature))
        for prompt in prompts[:2]
        for count in (0, 1, 5, 9, 10)
        for temperature in (0, 1.5)
    ]
    for case in mixed:
        count = case.params.min_tokens
        assert len(case.answer.token_ids) == min(count + 1, 10)
        assert (case.answer.finish_reason == "stop") == (count < 10)
    for kind in ("right", "unwanted_tokens"):
        assert_answers(run(tiny, mixed, Guesser(tiny, mixed, kind), max_draft=15), mixed)
    ignored = twin.case("ignored", prompts[0], replace(keen, ignore_eos=True, min_tokens=4))
    assert ignored.answer.token_ids == [end] * 10
    assert_answers(run(tiny, [ignored], Guesser(tiny, [ignored], "right")), [ignored])


# ---- nothing left


SHORT_LIVED = SamplingParams(  # "q" again and again, until a "z", after which nothing may come
    allowed_token_ids=[Z, Q], bad_words=["zz", "zq"], temperature=1.0, max_tokens=24, seed=0,
    logit_bias={Z: -1.0},
)  # fmt: skip


def short_lived(twin, prompt, count=12):
    found = [
        twin.case("dead", prompt, replace(SHORT_LIVED, seed=seed, logprobs=1))
        for seed in range(count)
    ]
    lengths = {len(case.answer.token_ids) for case in found}
    reasons = Counter(case.answer.finish_reason for case in found)
    assert len(lengths) > 3
    assert reasons["error"] > 3
    for case in found:
        if case.answer.finish_reason == "error":
            assert case.answer.token_ids[-1] == Z
            assert case.answer.dead_by == "bad_words"
    return found


def calm(twin, prompts):
    """Requests that nothing happens to, greedy and not, with options and without."""
    return [
        twin.case("calm", prompts[1], BASE),
        twin.case("calm", prompts[2], replace(WARM, frequency_penalty=1.0, logprobs=2)),
        twin.case("calm", prompts[3], replace(WARM, bad_words=["zq", "the"])),
    ]


@pytest.mark.parametrize("max_draft", [0, 1, 3, 7, 15])
@pytest.mark.parametrize("kind", ["right", "mixed", "turns"])
def test_dead_rows_in_a_draft(tiny, twin, prompts, max_draft, kind):
    mixed = [*calm(twin, prompts), *short_lived(twin, prompts[0])]
    random.Random(1).shuffle(mixed)
    generated = run(tiny, mixed, Guesser(tiny, mixed, kind), max_draft=max_draft)
    assert_answers(generated, mixed)
    for each in generated:
        if each.error is not None:
            assert "bad_words" in str(each.error)
            assert f"step {len(each.events)})" in str(each.error)
            assert "\n" not in str(each.error)
    if kind == "right" and max_draft == 15:  # the draft went on behind the dead row
        dead = [each for each in generated if each.finish_reason == "error"]
        assert all(len(each.events) <= 3 for each in dead)
        assert sum(each.stats.num_drafted - each.stats.num_accepted for each in dead) > 10


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_dead_row_behind_a_wrong_guess_kills_nobody(tiny, twin, prompts, temperature):
    """The answer is "q" only; drafts step into "z", after which nothing could come."""
    params = replace(SHORT_LIVED, temperature=temperature, logit_bias={Z: -60}, logprobs=2)
    mixed = [twin.case("off path", prompt, params) for prompt in prompts[:3]]
    assert all(case.answer.token_ids == [Q] * 24 for case in mixed)

    class IntoDeath(Guesser):
        def guess(self, request):
            turn = len(request.tokens) % 3
            return [*[Q] * turn, Z, Q, Z, 7, *[Q] * 15][: request.max_draft]

    mixed += calm(twin, prompts)
    for max_draft in (1, 3, 7, 15):
        generated = run(tiny, mixed, IntoDeath(tiny, mixed, "right"), max_draft=max_draft)
        assert_answers(generated, mixed)
        count = totals(generated[:3])
        assert count["num_drafted"] > count["num_accepted"]
        assert (count["num_accepted"] > 0) == (max_draft > 0)


@pytest.mark.parametrize(
    ("options", "option", "length"),
    [
        ({"allowed_token_ids": [299], "min_tokens": 3}, "min_tokens", 0),
        ({"allowed_token_ids": [Z, 5], "banned_token_ids": [5], "bad_words": "z"}, "bad_words", 0),
        ({"allowed_token_ids": [Z], "bad_words": ["zz"]}, "bad_words", 1),
        ({"allowed_token_ids": [Z], "bad_words": ["zzzz"]}, "bad_words", 3),
        ({"allowed_token_ids": [Z], "bad_words": ["zzz"], "temperature": 0}, "bad_words", 2),
        ({"allowed_token_ids": [Z, Q], "bad_words": ["zq", "zz"], "min_tokens": 5,
          "stop_token_ids": [Q]}, "bad_words", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("max_draft", [0, 7])
def test_options_that_leave_nothing(tiny, twin, prompts, options, option, length, max_draft):
    params = replace(WARM, **options)
    mixed = [twin.case("dead", prompts[0], params), *calm(twin, prompts)]
    assert mixed[0].answer.finish_reason == "error"
    assert len(mixed[0].answer.token_ids) == length
    dead, *_ = generated = run(tiny, mixed, Guesser(tiny, mixed, "turns"), max_draft=max_draft)
    assert_answers(generated, mixed)
    assert option in str(dead.error)


def test_a_ban_of_the_whole_vocabulary(tiny, twin, prompts):
    everything = replace(WARM, banned_token_ids=list(range(tiny.vocab_size)))
    mixed = [twin.case("dead", prompts[0], everything), *calm(twin, prompts)]
    generated = run(tiny, mixed, Guesser(tiny, mixed, "turns"))
    assert_answers(generated, mixed)
    assert "banned_token_ids" in str(generated[0].error)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("penalty", [0.01, 0.5, 20, 100])
def test_wild_repetition_penalties(tiny, twin, prompts, penalty, temperature):
    """The widest that may be asked for; beyond them float32 would not hold the logits."""
    params = replace(BASE, repetition_penalty=penalty, temperature=temperature)
    others = calm(twin, prompts)
    bench = Bench(tiny.folder)
    wild = bench.add(prompts[0], params)
    generated = bench.generate([case.prompt for case in others], [case.params for case in others])
    assert_answers(generated, others)
    assert wild.token_ids == twin.answer(prompts[0], params).token_ids


def test_a_line_feed_as_a_bad_word_leaves_spaces_alone(tiny, twin, prompts):
    """The word after a space is " \\n", two tokens: only its last may be banned."""
    params = replace(BASE, bad_words="\n", allowed_token_ids=[198, 220, 42], logit_bias={220: 50})
    case = twin.case("bad_words", prompts[0], params)
    assert case.answer.token_ids == [220] * 14
    assert_answers(run(tiny, [case]), [case])


# ---- log-probabilities


@pytest.fixture(scope="module")
def scored(twin, prompts):
    dice = random.Random(5)
    found = []
    for index in range(24):
        params = replace(
            BASE if index % 3 == 0 else WARM,
            seed=index,
            logprobs=dice.choice([0, 1, 5, 20]),
            logprobs_mode=("raw", "processed")[index % 2],
            top_k=dice.choice([0, 0, 7]),
            top_p=dice.choice([1.0, 0.9]),
            frequency_penalty=dice.choice([0, 1.0]),
            logit_bias=dice.choice([{}, {5: 4.0, 6: -4.0}]),
            bad_words=dice.choice([(), "the"]),
            presence_penalty=dice.choice([0, 1.0]),
        )
        found.append(twin.case("scored", prompts[index % 8], params))
    return [case for case in found if case.answer.closeness > CLOSE]


def near(left, right, within):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.token_id == b.token_id
        assert a.rank == b.rank
        assert a.logprob == pytest.approx(b.logprob, abs=within)
        assert [x for _, x in a.top] == pytest.approx([x for _, x in b.top], abs=within)


@pytest.mark.parametrize("kind", ["right", "turns"])
def test_logprobs_with_and_without_speculation(tiny, scored, kind):
    plain = run(tiny, scored)
    assert_answers(plain, scored)
    for max_draft in (1, 7, 15):
        generated = run(tiny, scored, Guesser(tiny, scored, kind), max_draft=max_draft)
        assert_answers(generated, scored)
        assert totals(generated)["num_accepted"] > 0
        for each, want in zip(generated, plain, strict=True):
            near(logprobs_of(each), logprobs_of(want), 3e-5)  # float32: one unit is 1e-6


@pytest.mark.parametrize("kernels", ["numba", "compiled"])
def test_logprobs_are_equal_to_the_bit_where_bits_are_exact(tiny_compiled, prompts, kernels):
    twin = Twin(tiny_compiled)
    mixed = [
        twin.case("scored", prompt, replace(base, logprobs=5, logprobs_mode=mode, seed=3))
        for prompt in prompts[:4]
        for base in (BASE, WARM)
        for mode in ("raw", "processed")
    ]
    options = {"exact_bits": "on", "kernels": kernels, "block_size": 32, "kv_cache_tokens": 4096}
    plain = run(tiny_compiled, mixed, **options)
    generated = run(tiny_compiled, mixed, Guesser(tiny_compiled, mixed, "turns"), **options)
    assert totals(generated)["num_accepted"] > 0
    for each, want in zip(generated, plain, strict=True):
        assert each.token_ids == want.token_ids
        assert logprobs_of(each) == logprobs_of(want)


def test_greedy_processed_logprobs_say_certainty(tiny, twin, prompts):
    params = replace(BASE, logprobs=5, logprobs_mode="processed")
    case = twin.case("processed", prompts[0], params)
    (each,) = run(tiny, [case])
    for one in logprobs_of(each):
        assert (one.logprob, one.rank) == (0.0, 1)
        assert one.top == ((one.token_id, 0.0),)


def test_raw_logprobs_do_not_feel_the_options(tiny, twin, prompts):
    """A token that the options force has the model's own poor opinion of it."""
    forced = replace(WARM, allowed_token_ids=[Z], logprobs=3, max_tokens=4)
    raw = twin.case("raw", prompts[0], forced)
    processed = twin.case("processed", prompts[0], replace(forced, logprobs_mode="processed"))
    mixed = [raw, processed]
    generated = run(tiny, mixed, Guesser(tiny, mixed, "right"))
    assert_answers(generated, mixed)
    opinions = [logprobs_of(each) for each in generated]
    assert all(one.logprob < -1 and one.rank > 3 and len(one.top) == 3 for one in opinions[0])
    assert all(one.top == ((Z, 0.0),) and one.logprob == 0 for one in opinions[1])


# ---- the prompt's log-probabilities


def assert_prompt_logprobs(tiny, found, prompt, count):
    rows = prompt_rows(tiny.model, prompt)
    assert [one.token_id for one in found] == prompt[1:]
    for one, row in zip(found, rows, strict=True):
        assert_logprob(one, row, count)


@pytest.fixture(scope="module")
def judged(twin, prompts):
    return [
        twin.case(
            "prompt_logprobs",
            prompt,
            replace((BASE, WARM)[index % 2], prompt_logprobs=(0, 3, 20)[index % 3], seed=index),
        )
        for index, prompt in enumerate([*prompts, prompts[7], [5], prompts[2] * 2])
    ]


@pytest.mark.parametrize(
    ("options", "preempted"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 7, "max_num_seqs": 4}, False),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 1}, False),
        ({"max_num_batched_tokens": 11, "max_num_seqs": 3, "enable_prefix_caching": False}, False),
        ({"cache_blocks": 24, "max_model_len": 192, "max_num_batched_tokens": 20,
          "max_num_seqs": 8}, True),
    ],
)  # fmt: skip
def test_prompt_logprobs(tiny, judged, options, preempted):
    bench = Bench(tiny.folder, Guesser(tiny, judged * 2, "turns"), **options)
    given = [case.prompt for case in judged], [case.params for case in judged]
    for _ in range(2):  # the second time, the prefix cache holds all of it
        generated = bench.generate(*given)
        assert_answers(generated, judged)
        for each, case in zip(generated, judged, strict=True):
            wanted = case.params.prompt_logprobs
            assert_prompt_logprobs(tiny, each.request.prompt_logprobs, case.prompt, wanted)
        if preempted:
            assert totals(generated)["num_preemptions"] > 0


def test_prompt_logprobs_with_a_warm_prefix_cache(tiny, twin, prompts):
    plain = [twin.case("plain", prompt, BASE) for prompt in prompts]
    asking = [
        twin.case("asking", prompt, replace(BASE, prompt_logprobs=2, max_tokens=count))
        for prompt, count in zip(prompts, [0, 5] * 4, strict=True)
    ]
    bench = Bench(tiny.folder)
    for cases in (plain, plain, asking, plain, asking):
        generated = bench.generate([c.prompt for c in cases], [c.params for c in cases])
        assert_answers(generated, cases)
        if cases is asking:
            for each, case in zip(generated, cases, strict=True):
                assert_prompt_logprobs(tiny, each.request.prompt_logprobs, case.prompt, 2)
    again = bench.generate([case.prompt for case in plain], [case.params for case in plain])
    assert sum(each.stats.num_cached_tokens for each in again) > 50  # it was warm


@pytest.mark.parametrize("tokens", [4, 256])
def test_no_tokens_at_all(tiny, twin, prompts, tokens):
    params = replace(WARM, max_tokens=0, prompt_logprobs=1, logprobs=1)
    mixed = [twin.case("none", prompt, params) for prompt in prompts]
    mixed += [twin.case("none", [9], params), twin.case("some", prompts[0], WARM)]
    generated = run(
        tiny, mixed, Guesser(tiny, mixed, "turns"), max_num_batched_tokens=tokens, max_num_seqs=4
    )  # fmt: skip
    assert_answers(generated, mixed)
    for each, case in zip(generated[:-1], mixed, strict=False):
        assert (each.token_ids, each.text) == ([], "")
        assert each.finish_reason == FinishReason.LENGTH
        assert_prompt_logprobs(tiny, each.request.prompt_logprobs, case.prompt, 1)


# ---- through the engine: n, echo, streams, refusals


OPTIONS = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def engine(repeating):
    with Engine.from_pretrained(str(repeating.folder), drafter="ngram", **OPTIONS) as engine:
        yield engine


SAMPLED = SamplingParams(temperature=0.7, max_tokens=20, seed=5, frequency_penalty=-0.4)


def test_n_samples(engine, repeating_twin, prompts):
    counts = [3, 1, 4, 2]
    each = [replace(SAMPLED, n=count, seed=seed) for seed, count in enumerate(counts)]
    results = engine.generate(prompts[:4], each)
    indexes = [(prompt, index) for prompt, n in enumerate(counts) for index in range(n)]
    assert len(results) == len(indexes)
    seeds = set()
    for result, (prompt, index) in zip(results, indexes, strict=True):
        assert result.sample_index == index
        assert result.prompt_token_ids == tuple(prompts[prompt])
        assert (result.seed == prompt) == (index == 0)
        want = repeating_twin.answer(prompts[prompt], each[prompt], seed=result.seed)
        assert list(result.token_ids) == want.token_ids
        assert result.text == want.text
        alone = engine.generate(
            prompts[prompt], replace(each[prompt], n=1, seed=result.seed)
        )[0]  # fmt: skip
        assert (alone.token_ids, alone.seed) == (result.token_ids, result.seed)
        assert alone.sample_index == 0
        seeds.add(result.seed)
    assert len(seeds) == len(results)
    assert len({result.token_ids for result in results[4:8]}) > 1
    assert sum(result.stats.num_accepted for result in results) > 0


def test_n_samples_without_a_seed(engine, prompts):
    params = replace(SAMPLED, n=5, seed=None)
    first, second = (engine.generate(prompts[0], params) for _ in range(2))
    assert len({result.seed for result in [*first, *second]}) == 10
    for result in first:
        (again,) = engine.generate(prompts[0], replace(params, n=1, seed=result.seed))
        assert again.token_ids == result.token_ids


def test_many_samples(engine, prompts):
    results = engine.generate(prompts[1], replace(SAMPLED, n=128, max_tokens=2))
    assert [result.sample_index for result in results] == list(range(128))
    assert len({result.seed for result in results}) == 128


def test_samples_die_alone(engine, repeating_twin, prompts):
    params = replace(SHORT_LIVED, n=12, logit_bias={})
    results = engine.generate(prompts[0], params)
    for result in results:
        want = repeating_twin.answer(prompts[0], params, seed=result.seed)
        assert (list(result.token_ids), result.text) == (want.token_ids, want.text)
        assert result.finish_reason == want.finish_reason
        assert isinstance(result.error, NoTokenPossible) == (want.finish_reason == "error")
    assert len({len(result.token_ids) for result in results}) > 1
    assert any(result.error for result in results)


def check_chunks(chunks, results):
    """The chunks of each sample, joined, are its result; a result comes with its last chunk."""
    for index, result in enumerate(results):
        own = [chunk for chunk in chunks if chunk.sample_index == index]
        assert "".join(chunk.text for chunk in own) == result.text
        assert tuple(t for chunk in own for t in chunk.token_ids) == result.token_ids
        assert all(chunk.result is None for chunk in own[:-1])
        last = own[-1].result
        for name in ("token_ids", "text", "seed", "sample_index", "logprobs", "finish_reason"):
            assert getattr(last, name) == getattr(result, name), name
        if result.logprobs is not None:
            joined = tuple(one for chunk in own for one in chunk.logprobs or ())
            assert joined == result.logprobs
            assert [one.token_id for one in joined] == list(result.token_ids)
    indexes = [chunk.sample_index for chunk in chunks]
    assert set(indexes) == set(range(len(results)))
    turns = sum(a != b for a, b in itertools.pairwise(indexes))
    assert turns >= 2 * len(results)  # interleaved, not one after the other


def test_streams_of_n_samples(engine, prompts):
    params = replace(SAMPLED, n=3, echo=True)
    results = engine.generate(prompts[2], params)
    check_chunks(list(engine.stream(prompts[2], params)), results)


def test_asyncio_streams_of_n_samples(engine, prompts):
    params = replace(SAMPLED, n=4)
    results = engine.generate(prompts[2], params)

    async def collect():
        chunks = [chunk async for chunk in engine.astream(prompts[2], params)]
        return chunks, await engine.agenerate(prompts[2], params)

    chunks, gathered = asyncio.run(collect())
    check_chunks(chunks, results)
    assert [each.token_ids for each in gathered] == [each.token_ids for each in results]


def test_logprobs_of_results(engine, repeating, repeating_twin, prompts):
    params = [
        replace(SAMPLED, logprobs=4, prompt_logprobs=2, n=2, logprobs_mode=mode)
        for mode in ("raw", "processed")
    ]
    results = engine.generate([prompts[3]] * 2, params)
    for result in results:
        own = result.params
        want = repeating_twin.answer(prompts[3], own, seed=result.seed)
        assert list(result.token_ids) == want.token_ids
        assert_logprobs(result.logprobs, own, want.rows(own.logprobs_mode))
        if own.logprobs_mode == "raw":
            assert_prompt_logprobs(repeating, result.prompt_logprobs, prompts[3], 2)
    bare = engine.generate(prompts[3], SAMPLED)[0]
    assert bare.logprobs is None
    assert bare.prompt_logprobs is None
    assert bare.token_ids == results[0].token_ids
    chunks = list(engine.stream(prompts[3], replace(params[0], n=1)))
    joined = [one for chunk in chunks for one in chunk.logprobs]
    assert [one.token_id for one in joined] == list(results[0].token_ids)
    near(joined, results[0].logprobs, 3e-5)


@pytest.mark.parametrize("n", [1, 3])
def test_echo(engine, n):
    text = "the quick brown fox, naïve café"
    ids = engine.encode(text)
    chat = [{"role": "user", "content": "hello"}]
    params = replace(SAMPLED, n=n)
    plain = engine.generate([text, ids, chat], params)
    echoed = engine.generate([text, ids, chat], replace(params, echo=True))
    for with_it, without in zip(echoed, plain, strict=True):
        assert with_it.token_ids == without.token_ids
        assert with_it.text.endswith(without.text)
        assert with_it.text.startswith(text if len(with_it.prompt_token_ids) == len(ids) else "")
    assert [result.text for result in echoed[: 2 * n]] == [
        text + result.text for result in plain[: 2 * n]
    ]
    assert "hello" in echoed[2 * n].text


def test_echo_and_stop_strings(engine):
    """What stands in the prompt does not stop the answer."""
    plain = engine.generate("the fox", replace(SAMPLED, stop=["zzz"]))[0]
    (echoed,) = engine.generate("the fox", replace(SAMPLED, stop=["zzz", "the fox"], echo=True))
    assert echoed.text == "the fox" + plain.text
    chunks = list(engine.stream("the fox", replace(SAMPLED, echo=True)))
    assert "".join(chunk.text for chunk in chunks) == "the fox" + plain.text


def test_nothing_but_the_prompt(engine, repeating, prompts):
    text = "the quick brown fox"
    params = SamplingParams(max_tokens=0, echo=True, n=2, prompt_logprobs=3)
    results = engine.generate([text, prompts[7]], params)
    assert len(results) == 4
    for result in results:
        assert result.token_ids == ()
        assert result.finish_reason == FinishReason.LENGTH
        assert result.error is None
        assert result.text == repeating.codec.decode(result.prompt_token_ids)
        assert_prompt_logprobs(
            repeating, result.prompt_logprobs, list(result.prompt_token_ids), 3
        )  # fmt: skip
    (bare,) = engine.generate(text, SamplingParams(max_tokens=0, echo=True))
    assert (bare.text, bare.token_ids, bare.prompt_logprobs) == (text, (), None)
    (silent,) = engine.generate(text, SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=2))
    assert (silent.text, silent.logprobs) == ("", ())
    assert all(one.top == () for one in silent.prompt_logprobs)
    chunks = list(engine.stream(text, SamplingParams(max_tokens=0, echo=True)))
    assert "".join(chunk.text for chunk in chunks) == text
    assert chunks[-1].result.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [1, 304]}, {"banned_token_ids": [304]}, {"logit_bias": {304: 1.0}},
        {"logit_bias": {10**12: -1.0}}, {"allowed_token_ids": [2**63]},
        {"banned_token_ids": [2**70]}, {"stop_token_ids": [304]},
    ],
)  # fmt: skip
def test_ids_outside_the_vocabulary(engine, prompts, options):
    params = SamplingParams(**options, max_tokens=4)
    before = engine.machinery.scheduler.unfinished()
    assert not before
    for call in (
        lambda: engine.generate(prompts[:2], [BASE, params]),
        lambda: list(engine.stream(prompts[0], params)),
    ):
        with pytest.raises(InvalidToken) as caught:
            call()
        ((name, ids),) = options.items()
        assert str(max(ids)) in str(caught.value)
        assert name in str(caught.value)
    assert not engine.machinery.scheduler.unfinished()


def test_the_last_id_is_inside(engine, prompts):
    params = SamplingParams(
        allowed_token_ids=[303], logit_bias={303: math.pi}, banned_token_ids=[302, 0], max_tokens=2
    )
    assert engine.generate(prompts[0], params)[0].token_ids == (303, 303)


def test_bad_words_that_are_no_text(engine, prompts):
    with pytest.raises(InvalidParameter):
        engine.generate(prompts[0], SamplingParams(bad_words=["ok", "\ud800"]))
