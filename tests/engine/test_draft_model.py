"""A draft model changes nothing: greedy, across vocabularies, in company, short of everything."""

from __future__ import annotations

import json
import random

import pytest
import torch
from reference.plain import PlainLlama
from reference.tiny_draft import (
    TEXT,
    DraftBench,
    change_weights,
    greedy_loop,
    make_tokenizer,
    save_permuted,
    save_reciter,
    save_shaken,
)
from reference.tiny_engine import Bench

from forerun.draft import model, network, vocabulary
from forerun.draft.vocabulary import LinkKind
from forerun.engine.engine import Engine
from forerun.errors import ConfigError, ModelNotFound, UnsupportedModel
from forerun.params import SamplingParams
from forerun.types import FinishReason

GREEDY = SamplingParams(temperature=0, max_tokens=30)


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Draft as far as allowed: these models are never sure of anything."""
    monkeypatch.setattr(model, "RATE", 0.0)


@pytest.fixture(scope="module")
def shaken(tiny, tmp_path_factory):
    return save_shaken(tmp_path_factory.mktemp("shaken") / "model", tiny.folder, 0.05)


@pytest.fixture(scope="module")
def permuted(tiny, tmp_path_factory):
    return save_permuted(tmp_path_factory.mktemp("permuted") / "model", tiny.folder)


@pytest.fixture(scope="module")
def reciters(tmp_path_factory):
    """A target and a draft model that say the same text in different tokens."""
    folder = tmp_path_factory.mktemp("reciters")
    ours = make_tokenizer(["abc", "def", " gh", "ijk", "éλ", "lm"])
    theirs = make_tokenizer([" abcd", "ef", "hi", "jklmn", "012", "你"])
    target, draft = save_reciter(folder / "target", ours), save_reciter(folder / "draft", theirs)
    save_reciter(folder / "letters", make_tokenizer([]))
    prompts = [
        ours.encode((TEXT * 4)[first : 2 * first + 40], add_special_tokens=False).ids
        for first in range(5)
    ]
    return target, {"words": draft, "letters": folder / "letters"}, ours, prompts


def assert_plain(tiny, generated, params=GREEDY, **options):
    for each in generated:
        prompt = each.request.tokens[: each.request.num_prompt]
        want = tiny.plain(prompt, params, **options)
        assert tuple(each.token_ids) == want.token_ids
        assert (each.text, each.finish_reason) == (want.text, want.finish_reason)
        assert each.error is None
        assert each.stats.drafter_faults == {}


@pytest.mark.parametrize("together", [True, False], ids=["batch", "alone"])
@pytest.mark.parametrize("max_draft", [1, 3, 7])
def test_the_target_as_its_own_draft_model_is_always_right(tiny, prompts, max_draft, together):
    bench = DraftBench(tiny.folder, tiny.folder, max_draft=max_draft)
    for batch in [prompts] if together else [[prompt] for prompt in prompts[:3]]:
        before = bench.num_steps
        bench.generate(batch, GREEDY)
        # each step gives all of a draft and one token more
        assert bench.num_steps - before <= 2 + -(-30 // (max_draft + 1))
    assert_plain(tiny, bench.seen)
    assert bench.accepted == bench.drafted > 0
    assert all(outcome.stats.num_accepted for outcome in bench.seen)


@pytest.mark.parametrize("max_draft", [1, 4, 15])
def test_a_draft_model_that_is_nearly_right_changes_nothing(tiny, prompts, shaken, max_draft):
    bench = DraftBench(tiny.folder, shaken, max_draft=max_draft)
    bench.generate(prompts, GREEDY)
    assert_plain(tiny, bench.seen)
    assert 0 < bench.accepted < bench.drafted


def test_seeded_tokens_stay_the_same(tiny, prompts, shaken):
    params = SamplingParams(temperature=0.7, top_k=20, seed=11, max_tokens=24)
    bench = DraftBench(tiny.folder, shaken)
    bench.generate(prompts, params)
    assert_plain(tiny, bench.seen, params)
    assert 0 < bench.accepted < bench.drafted


SETTINGS = {
    "plenty": {},
    "prompts in pieces": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "preemption": {"cache_blocks": 16, "max_model_len": 128},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_are_what_the_draft_model_says(tiny, prompts, shaken, name):
    """At every step, however the cache came to be what it is: from scratch gives the same."""
    twin = PlainLlama(shaken)
    bench = DraftBench(tiny.folder, shaken, max_draft=4, **SETTINGS[name])
    generated = bench.generate(prompts, GREEDY)
    assert_plain(tiny, bench.seen)
    lengths = set()
    for request, tokens, draft in bench.watched.seen:
        assert draft == greedy_loop(twin, tokens, len(draft)) if draft else True
        lengths.add(len(draft))
        assert len(draft) in (0, request.max_draft)
    assert {0, 4} <= lengths if name == "prompts in pieces" else 4 in lengths
    assert bench.accepted > 0
    if name == "preemption":
        assert sum(each.stats.num_preemptions for each in generated) > 0


def test_a_draft_ends_where_it_is_not_worth_another_pass(tiny, prompts, shaken, monkeypatch):
    """Of every draft all but the last token was likely enough to go on from."""
    monkeypatch.setattr(model, "RATE", 0.05)
    twin = PlainLlama(shaken)
    bench = DraftBench(tiny.folder, shaken, max_draft=7)
    bench.generate(prompts[:4], GREEDY)
    assert_plain(tiny, bench.seen)
    lengths = []
    for request, tokens, draft in bench.watched.seen:
        likely, text = 1.0, list(tokens)
        for token in draft:
            assert likely >= 0.05, "a draft went on too long"
            likely *= float(torch.tensor(twin.next_logits(text)).softmax(-1)[token])
            text.append(token)
        assert likely < 0.05 or len(draft) == request.max_draft, "a draft ended too early"
        lengths.append(len(draft))
    assert 1 <= min(lengths) < max(lengths)


def test_a_draft_ends_at_the_end_of_text(tiny, prompts):
    """What would follow it is never needed; ignoring it, everything is."""
    answer = tiny.plain(prompts[0], GREEDY).token_ids
    config = json.loads((tiny.folder / "config.json").read_text())
    assert not set(config["eos_token_id"]) & set(answer)
    for ignore, longest in ((False, 4), (True, 7)):
        bench = DraftBench(tiny.folder, tiny.folder, max_draft=7)
        side = bench.drafter._link.draft
        object.__setattr__(side, "eos_ids", (answer[3],))
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=ignore)
        bench.generate([prompts[0]], params)
        assert tuple(bench.seen[0].token_ids) == answer
        first = bench.watched.seen[0][2]
        assert first == list(answer[:longest])


# --- another vocabulary


def test_shared_tokens_are_replaced_by_their_like(tiny, prompts, permuted):
    bench = DraftBench(tiny.folder, permuted)
    assert bench.drafter._link.kind is LinkKind.SHARED
    bench.generate(prompts, GREEDY)
    assert_plain(tiny, bench.seen)
    assert bench.accepted > 0
    # As long as no id without text comes up, the permuted model is the target itself.
    by_token = [each for each in bench.seen if max(each.request.tokens) < tiny.codec.vocab_size]
    assert by_token
    assert all(each.stats.num_accepted == each.stats.num_drafted > 0 for each in by_token)


def test_a_draft_model_that_lacks_tokens_drafts_the_others(tiny, prompts, tmp_path):
    """Its context is text as soon as a token has no like; what it drafts has one always."""
    draft = save_permuted(tmp_path / "fewer", tiny.folder, keep=280)
    bench = DraftBench(tiny.folder, draft)
    assert bench.drafter._link.kind is LinkKind.SHARED
    assert 0.9 < bench.drafter._link.map.share < 1
    bench.generate(prompts, GREEDY)
    assert_plain(tiny, bench.seen)
    assert 0 < bench.accepted < bench.drafted


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_text_stands_between_vocabularies(tiny, prompts, permuted, options, monkeypatch):
    monkeypatch.setattr(vocabulary, "LEAST_SHARED", 2.0)
    bench = DraftBench(tiny.folder, permuted, **options)
    assert bench.drafter._link.kind is LinkKind.TEXT
    bench.generate(prompts, GREEDY)
    assert_plain(tiny, bench.seen)
    assert 0 < bench.accepted < bench.drafted


@pytest.mark.parametrize("max_draft", [1, 2, 5, 12])
@pytest.mark.parametrize("kind", ["words", "letters"])
def test_two_that_say_the_same_agree_by_text(reciters, kind, max_draft, monkeypatch):
    """Nothing is lost between them, but where committed text ends inside a token of either one:
    a reciter knows whole ones only.
    """
    monkeypatch.setattr(vocabulary, "LEAST_SHARED", 2.0)
    target, drafts, tokenizer, prompts = reciters
    params = SamplingParams(temperature=0, max_tokens=50)
    want = [each.token_ids for each in Bench(target).generate(prompts, params)]
    assert all(tokenizer.decode(ids) in TEXT * 4 for ids in want)
    bench = DraftBench(target, drafts[kind], max_draft=max_draft)
    assert [each.token_ids for each in bench.generate(prompts, params)] == want
    assert bench.accepted > (0.9 if kind == "letters" else 0.4) * bench.drafted
    assert bench.drafted > 0.6 * 5 * 50 * max_draft / (max_draft + 1)


@pytest.mark.parametrize("max_draft", [1, 2, 5, 12])
def test_two_that_say_the_same_change_nothing_by_shared_tokens(reciters, max_draft):
    """The draft model lacks some of the target's tokens, and cannot draft some of its own."""
    target, drafts, _, prompts = reciters
    params = SamplingParams(temperature=0, max_tokens=50)
    want = [each.token_ids for each in Bench(target).generate(prompts, params)]
    bench = DraftBench(target, drafts["words"], max_draft=max_draft)
    assert bench.drafter._link.kind is LinkKind.SHARED
    assert [each.token_ids for each in bench.generate(prompts, params)] == want
    assert 0 < bench.accepted < bench.drafted


def test_no_text_and_few_shared_tokens_is_refused(tiny, tmp_path):
    """A vocabulary without tokens for bytes cannot spell what others write."""
    draft = save_permuted(tmp_path / "mute", tiny.folder)
    words = {"a": 0, "b": 1}
    described = json.loads((draft / "tokenizer.json").read_text())
    described["model"] |= {"vocab": words, "merges": []}
    (draft / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UnsupportedModel, match=r"another vocabulary: \d% .*draft model's"):
        DraftBench(tiny.folder, draft)


def test_a_token_without_like_and_no_text_ends_drafts(tiny, prompts, caplog):
    """Equal vocabularies, but the draft model's logits are padded less."""
    bench = DraftBench(tiny.folder, tiny.folder)
    table = bench.drafter._link.map.to_draft
    odd = tiny.vocab_size - 1
    table[odd] = vocabulary.NO_TOKEN
    batch = [prompts[0], [*prompts[1], odd], prompts[2]]
    bench.generate(batch, GREEDY)
    assert_plain(tiny, bench.seen)
    assert bench.seen[1].stats.num_drafted == 0
    assert bench.seen[0].stats.num_accepted > 0
    assert bench.drafter.skipped == {"unknown_token": 1}


# --- company, ends, too little of everything


def test_cancelled_requests_leave_nothing(tiny, prompts, shaken):
    bench = DraftBench(tiny.folder, shaken)
    added = [bench.add(prompt, GREEDY) for prompt in prompts]
    for _ in range(3):
        bench.step()
    for each in added[::2]:
        bench.cancel(each)
    bench.run()
    assert all(each.finish_reason is FinishReason.CANCELLED for each in added[::2])
    assert_plain(tiny, added[1::2])
    assert bench.accepted > 0


def test_requests_come_and_go(tiny, prompts, shaken):
    dice = random.Random(5)
    bench = DraftBench(
        tiny.folder, shaken, cache_blocks=24, max_model_len=128, max_num_batched_tokens=32,
        max_num_seqs=8,
    )  # fmt: skip
    added, cancelled = [], set()
    for _ in range(120):
        if len(added) < 24 and dice.random() < 0.4:
            added.append(bench.add(dice.choice(prompts), GREEDY))
        bench.step()
        if added and dice.random() < 0.08:
            victim = dice.choice(added)
            bench.cancel(victim)
            if victim.finish_reason is FinishReason.CANCELLED:
                cancelled.add(id(victim))
    bench.run()
    assert cancelled
    assert_plain(tiny, [each for each in added if id(each) not in cancelled])
    assert 0 < bench.accepted < bench.drafted


@pytest.mark.parametrize("at", [3, 8, 13])
def test_a_stop_inside_a_draft(tiny, prompts, at):
    stop = tiny.plain(prompts[2], GREEDY).token_ids[at]
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop])
    bench = DraftBench(tiny.folder, tiny.folder, max_draft=7)
    bench.generate([prompts[2]] * 2 + prompts[:2], params)
    for each in bench.seen[:2]:
        assert each.finish_reason is FinishReason.STOP
        answer = tiny.plain(prompts[2], GREEDY).token_ids
        assert tuple(each.token_ids) == answer[: answer.index(stop) + 1]
    assert bench.accepted > 0


def test_it_drafts_up_to_the_end_of_the_targets_context(tiny, prompts):
    params = SamplingParams(temperature=0, max_tokens=None)
    bench = DraftBench(tiny.folder, tiny.folder, max_model_len=64, max_draft=7)
    bench.generate(prompts[:3], params)
    assert_plain(tiny, bench.seen, params, max_model_len=64)
    assert bench.accepted == bench.drafted > 100


def test_a_shorter_context_than_the_targets_ends_drafts(tiny, prompts, tmp_path, caplog):
    draft = save_permuted(tmp_path / "short", tiny.folder)
    for path in tiny.folder.iterdir():
        (draft / path.name).write_bytes(path.read_bytes())
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    params = SamplingParams(temperature=0, max_tokens=40)
    bench = DraftBench(tiny.folder, draft, max_draft=4)
    bench.generate([prompts[0], prompts[5], prompts[1]], params)
    assert_plain(tiny, bench.seen, params)
    first, long, _ = bench.seen
    assert long.request.num_prompt > 32
    assert long.stats.num_drafted == 0
    assert first.stats.num_drafted > 0
    reach = [len(tokens) + len(draft) for _, tokens, draft in bench.watched.seen if draft]
    assert max(reach) == 33, "the last draft token needs no position"
    assert bench.drafter.skipped == {"context_end": 3}
    assert [r.message for r in caplog.records if "the draft model, 32 positions" in r.message] != []
    assert bench.drafter.cache.num_free == bench.drafter.cache.num_blocks


def test_requests_that_find_no_block_decode_plainly(tiny, prompts, shaken, caplog, monkeypatch):
    monkeypatch.setattr(network, "CACHE_SHARE", 0.0)
    bench = DraftBench(tiny.folder, shaken, max_model_len=128)
    assert bench.drafter.cache.num_blocks == 16, "one request of full length"
    bench.generate(prompts, GREEDY)
    assert_plain(tiny, bench.seen)
    assert bench.accepted > 0
    assert bench.drafter.skipped["no_block"] > 1
    assert (
        len([r for r in caplog.records if "the draft model, 16 blocks, is full" in r.message]) == 1
    )


def rows_of(bench):
    """Count the rows of each draft pass from now on."""
    rows, forward = [], bench.drafter._network.forward

    def watched(pieces):
        rows.append(sum(len(piece.token_ids) for piece in pieces))
        return forward(pieces)

    bench.drafter._network.forward = watched
    return rows


def test_a_shared_beginning_is_computed_once_for_each_salt(tiny, prompts, shaken):
    prompt = [*prompts[7], *prompts[5]]
    bench = DraftBench(tiny.folder, shaken, max_draft=3)
    rows = rows_of(bench)
    firsts = []
    for salt in ("", "", "other", "other"):
        del rows[:]
        params = SamplingParams(temperature=0, max_tokens=12, cache_salt=salt)
        bench.generate([prompt], params)
        firsts.append(rows[0])
    whole, left = len(prompt), len(prompt) - (len(prompt) - 1) // 8 * 8
    assert firsts == [whole, left, whole, left]
    answers = {tuple(each.token_ids) for each in bench.seen}
    assert answers == {tiny.plain(prompt, params).token_ids}


def test_what_is_accepted_is_not_computed_again(tiny, prompts):
    """After a step in which all was accepted a request lacks its last draft token and the next."""
    bench = DraftBench(tiny.folder, tiny.folder, max_draft=3)
    rows = rows_of(bench)
    bench.generate([prompts[2]], GREEDY)
    assert rows[:6] == [len(prompts[2]), 1, 1, 2, 1, 1]


def test_a_pass_holds_no_more_rows_than_a_step(tiny, prompts, shaken):
    bench = DraftBench(tiny.folder, shaken, max_num_batched_tokens=16, max_num_seqs=8)
    rows = rows_of(bench)
    bench.generate(prompts, GREEDY)
    assert_plain(tiny, bench.seen)
    assert max(rows) == 16
    assert all(each.stats.num_drafted > 0 for each in bench.seen)


# --- a draft model that is broken


def poison(bench, token):
    bench.drafter._network.decoder._embedding[token] = torch.nan


def assert_clean(bench):
    assert not bench.drafter._network._passes.cache.values.isnan().any()


def test_nan_in_one_requests_context_costs_it_alone_its_drafts(tiny, prompts, shaken, caplog):
    bench = DraftBench(tiny.folder, shaken)
    odd = next(token for token in prompts[2] if sum(token in each for each in prompts) == 1)
    poison(bench, odd)
    answers = [tiny.plain(prompt, GREEDY).token_ids for prompt in prompts]
    safe = [i for i in range(8) if i != 2 and odd not in answers[i]]
    bench.generate([prompts[2], *(prompts[i] for i in safe)], GREEDY)
    for each, index in zip(bench.seen, [2, *safe], strict=True):
        assert tuple(each.token_ids) == answers[index]
        assert each.error is None
    assert bench.seen[0].stats.drafter_faults == {"propose_failed": 1}
    assert bench.seen[0].stats.num_drafted == 0
    assert "NaN or infinite logits" in caplog.text
    assert_clean(bench)
    for each in bench.seen[1:]:
        # they too may draft the token that is poisoned, and no more than that
        assert sum(each.stats.drafter_faults.values()) <= 1
    assert sum(each.stats.num_accepted for each in bench.seen[1:]) > 0
    # Whoever has the blocks now is none the worse for it.
    before = bench.accepted
    bench.generate([prompts[i] for i in safe[:2]], GREEDY)
    assert bench.accepted > before


def test_nan_in_the_middle_of_a_draft(tiny, prompts, caplog):
    """The draft model's own token is what breaks it: nothing of that draft is used."""
    answer = tiny.plain(prompts[0], GREEDY).token_ids
    token = answer[2]
    assert token not in prompts[0]
    assert token not in answer[:2]
    bench = DraftBench(tiny.folder, tiny.folder, max_draft=5)
    poison(bench, token)
    bench.generate([prompts[0]], GREEDY)
    assert tuple(bench.seen[0].token_ids) == answer
    assert bench.seen[0].stats.drafter_faults == {"propose_failed": 1}
    assert_clean(bench)


def test_a_pass_that_raises_is_forgotten(tiny, prompts, shaken):
    """Its requests are asked again each alone, and compute everything anew."""
    bench = DraftBench(tiny.folder, shaken)
    forward, calls = bench.drafter._network.forward, []

    def failing(pieces):
        calls.append(len(pieces))
        logits = forward(pieces)
        if len(calls) in (1, 9, 30):
            raise MemoryError("no room")
        return logits

    bench.drafter._network.forward = failing
    bench.generate(prompts, GREEDY)
    for each, prompt in zip(bench.seen, prompts, strict=True):
        assert tuple(each.token_ids) == tiny.plain(prompt, GREEDY).token_ids
    assert calls[0] > 1
    assert bench.accepted > 0


# --- by name


def test_an_engine_with_a_draft_model(tiny, shaken, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=20)
    spec = {"method": "draft_model", "model": str(shaken), "num_speculative_tokens": 4}
    options = {"dtype": "float32", "kernels": "torch", "num_threads": 1, "device": "cpu"}
    text = "the quick brown fox"
    with Engine.from_pretrained(str(tiny.folder), speculation=spec, **options) as engine:
        result = engine.generate(text, params)[0]
    assert result.token_ids == tiny.plain(tiny.codec.encode(text), params).token_ids
    assert result.stats.num_accepted > 0


def test_a_missing_draft_model_is_found_before_the_target_is_loaded(tiny, tmp_path, monkeypatch):
    def load(*_, **__):
        raise AssertionError("the target was loaded for nothing")

    monkeypatch.setattr("forerun.engine.engine.set_up", load)
    spec = {"drafter": "draft-model", "model": str(tmp_path / "nowhere")}
    with pytest.raises(ModelNotFound, match="nowhere"):
        Engine.from_pretrained(str(tiny.folder), speculation=spec)


def test_sampled_drafts_across_vocabularies_are_refused(tiny, permuted):
    with pytest.raises(ConfigError, match=r"draft_sampling='greedy'"):
        DraftBench(tiny.folder, permuted, draft_sampling="sampled")


def test_a_broken_draft_model_is_refused(tiny, shaken, tmp_path):
    draft = save_shaken(tmp_path / "broken", tiny.folder, 0.1)
    change_weights(draft, lambda name, weight: weight * torch.nan if "norm" in name else weight)
    with pytest.raises(Exception, match="NaN"):
        DraftBench(tiny.folder, draft)
