"""Where an answer ends, and what is left of it: cut exactly there, inside an accepted block too."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reference.drafters import Oracle, PastEnd, RightThenWrong
from reference.tiny import make_tiny
from reference.tiny_engine import Bench

from forerun.params import SamplingParams
from forerun.types import FinishReason

LONG = SamplingParams(temperature=0, max_tokens=40)
DRAFTERS = pytest.mark.parametrize("kind", [None, Oracle, PastEnd, RightThenWrong])


def run(tiny, prompt, params, kind, max_draft=15, **options):
    """Generate with a drafter that guesses past the stop; everything must equal the twin's."""
    free = replace(params, stop=(), stop_token_ids=(), ignore_eos=True, max_tokens=40)
    drafter = None
    if kind is not None:
        drafter = kind(tiny.answers([prompt], free), tiny.vocab_size)
    bench = Bench(tiny.folder, drafter, max_draft=max_draft, **options)
    (each,) = bench.generate([prompt], params)
    context = {"max_model_len": options["max_model_len"]} if "max_model_len" in options else {}
    want = tiny.plain(prompt, params, **context)
    assert tuple(each.token_ids) == want.token_ids
    assert each.text == want.text
    assert each.finish_reason == want.finish_reason
    assert_counts(each, drafted=kind is not None)
    return each


def assert_counts(each, drafted):
    """The counters say what the events say."""
    stats = each.stats
    assert stats.num_emitted == len(each.token_ids)
    assert stats.num_steps == len(each.events)
    assert stats.num_accepted == sum(event.num_accepted for event in each.events)
    assert stats.num_accepted <= stats.num_emitted
    for event in each.events:
        assert event.num_accepted <= len(event.token_ids) <= event.num_accepted + 1
        if event.finish_reason is None:
            assert len(event.token_ids) == event.num_accepted + 1
    assert all(event.finish_reason is None for event in each.events[:-1])
    if not drafted:
        assert stats.num_accepted == stats.num_drafted == 0


@DRAFTERS
@pytest.mark.parametrize("where", [0, 1, 6, 13])
def test_a_stop_token(tiny, prompts, kind, where):
    output = tiny.plain(prompts[0], LONG).token_ids
    token = output[where]
    assert token not in output[:where]
    each = run(tiny, prompts[0], replace(LONG, stop_token_ids=(301, token)), kind)
    assert each.finish_reason == FinishReason.STOP
    assert each.token_ids[-1] == token
    assert len(each.token_ids) == where + 1
    assert each.text == tiny.codec.decode(output[:where])
    if kind in (Oracle, PastEnd):
        assert each.stats.num_accepted == where + 1  # all in one block, the stop token guessed too
        assert each.stats.num_steps == 1


@pytest.fixture(scope="module")
def ending(tiny, prompts, tmp_path_factory):
    """The tiny model, but with an end-of-text that its greedy answers meet."""
    eos = tiny.plain(prompts[0], LONG).token_ids[9]
    model = make_tiny(tmp_path_factory.mktemp("ending") / "model", eos=[301, eos])
    assert model.plain(prompts[0], LONG).finish_reason == "stop"
    return model


@DRAFTERS
def test_end_of_text(ending, prompts, kind):
    each = run(ending, prompts[0], LONG, kind)
    assert each.finish_reason == FinishReason.STOP
    assert len(each.token_ids) == 10
    assert each.token_ids[-1] == ending.model.config["eos_token_id"][1]


@DRAFTERS
def test_end_of_text_ignored(ending, prompts, kind):
    eos = ending.model.config["eos_token_id"][1]
    each = run(ending, prompts[0], replace(LONG, ignore_eos=True), kind)
    assert each.finish_reason == FinishReason.LENGTH
    assert len(each.token_ids) == 40
    assert eos in each.token_ids
    # a stop token of the request's own stops it all the same
    own = run(ending, prompts[0], replace(LONG, ignore_eos=True, stop_token_ids=(eos,)), kind)
    assert len(own.token_ids) == 10


@DRAFTERS
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 16, 17])
def test_max_tokens_inside_a_block(tiny, prompts, kind, max_tokens):
    each = run(tiny, prompts[3], replace(LONG, max_tokens=max_tokens), kind)
    assert each.finish_reason == FinishReason.LENGTH
    assert len(each.token_ids) == max_tokens


@DRAFTERS
def test_a_stop_at_the_very_last_token_is_a_stop(tiny, prompts, kind):
    """Both ends fall on one token: the answer was complete."""
    output = tiny.plain(prompts[0], LONG).token_ids
    last = replace(LONG, max_tokens=7)
    each = run(tiny, prompts[0], replace(last, stop_token_ids=(output[6],)), kind)
    assert (len(each.token_ids), each.finish_reason) == (7, FinishReason.STOP)
    tried = 0
    for prompt in (prompts[0], prompts[3], prompts[7]):
        output = tiny.plain(prompt, LONG).token_ids
        for count in range(2, 30):
            text = tiny.codec.decode(output[:count])
            if "\ufffd" not in text[-1:] and text[-1:] not in tiny.codec.decode(
                output[: count - 1]
            ):
                params = replace(LONG, max_tokens=count, stop=text[-1:])
                each = run(tiny, prompt, params, kind)
                assert (len(each.token_ids), each.finish_reason) == (count, FinishReason.STOP)
                tried += 1
    assert tried > 3


def test_a_draft_is_never_longer_than_what_can_be_used(tiny, prompts):
    """The target gives one token of its own, so max_tokens - 1 drafts are the most."""
    each = run(tiny, prompts[3], replace(LONG, max_tokens=5), Oracle)
    assert each.stats.num_drafted == 4
    each = run(tiny, prompts[3], replace(LONG, max_tokens=1), Oracle)
    assert each.stats.num_drafted == 0


@DRAFTERS
@pytest.mark.parametrize("room", [1, 2, 7, 20])
def test_the_end_of_the_context(tiny, prompts, kind, room):
    limit = len(prompts[7]) + room
    for asked in (None, 40):
        params = replace(LONG, max_tokens=asked)
        each = run(tiny, prompts[7], params, kind, max_model_len=limit)
        assert each.finish_reason == FinishReason.LENGTH
        assert len(each.token_ids) == room


def stop_strings(tiny, prompt):
    """Pieces of the plain text: inside a token, across borders, a whole token, the very start."""
    output = tiny.plain(prompt, LONG).token_ids
    pieces = [tiny.codec.decode([token]) for token in output]
    text = tiny.codec.decode(output)
    found = []
    for index in range(2, len(pieces) - 2):
        two = pieces[index] + pieces[index + 1]
        if "\ufffd" not in two and len(two) >= 3 and text.count(two) == 1:
            found += [two, two[1:], two[:-1], two[1:-1]]
    return [stop for stop in found if len(stop) >= 1]


@DRAFTERS
def test_stop_strings_across_token_borders(tiny, prompts, kind):
    tried = 0
    for prompt in (prompts[0], prompts[3], prompts[7]):
        for stop in stop_strings(tiny, prompt)[:6]:
            for stops in (stop, ["never there", stop], [stop, stop + "x", stop[-1]]):
                each = run(tiny, prompt, replace(LONG, stop=stops), kind, max_draft=7)
                assert each.finish_reason == FinishReason.STOP
                assert stop not in each.text
                assert_never_sent(each, stop)
                tried += 1
    assert tried >= 10


def assert_never_sent(each, stop):
    """No prefix of the streamed text ever held the stop string."""
    sent = ""
    for piece in each.pieces:
        sent += piece
        assert stop not in sent


def test_a_stop_string_that_never_comes_withholds_nothing_at_the_end(tiny, prompts):
    text = tiny.plain(prompts[0], LONG).text
    each = run(tiny, prompts[0], replace(LONG, stop=text[-3:] + "never"), Oracle)
    assert each.text == text
    assert each.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("max_draft", [1, 4, 15])
def test_characters_are_never_split(tiny, prompts, max_draft):
    """Answers forced to be multi-byte text: each piece is whole characters."""
    text = "Bär 你好世界 🙂 привет 🙂🙂 naïve"
    script = tiny.codec.encode(text)
    assert len(script) > len(text), "bytes of one character must lie in several tokens"

    prompt = prompts[0]
    bench = Bench(tiny.folder, Oracle([[*prompt, *script]], tiny.vocab_size), max_draft=max_draft)
    forward = bench.machinery.runner.forward

    def scripted(step, wanted=None):
        logits, features = forward(step, wanted)
        logits = logits.clone().zero_()
        for row, index in enumerate(step.logit_rows.tolist()):
            place = int(step.positions[index]) + 1 - len(prompt)
            logits[row, script[place] if place < len(script) else 301] = 50.0
        return logits, features

    bench.machinery.runner.forward = scripted
    (each,) = bench.generate([prompt], SamplingParams(temperature=0, max_tokens=len(script)))
    assert each.token_ids == script
    assert each.text == text
    assert all("\ufffd" not in piece for piece in each.pieces)
    assert len(each.pieces) >= 3
    assert each.stats.num_accepted > 0


def test_half_a_character_at_the_end_is_a_replacement(tiny, prompts):
    """The text of the pieces is the text of all tokens, also where that ends in the middle."""
    for max_tokens in range(1, 30):
        params = replace(LONG, max_tokens=max_tokens)
        run(tiny, prompts[4], params, Oracle, max_draft=3)
