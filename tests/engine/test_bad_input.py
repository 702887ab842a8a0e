"""What users get wrong ends in a typed error with the number and the way out; others go on."""

from __future__ import annotations

import shutil
import threading

import numpy as np
import pytest

from forerun import Engine, SamplingParams
from forerun.errors import (
    CapacityError,
    ConfigError,
    ContextTooLong,
    EmptyPrompt,
    ForerunError,
    InvalidParameter,
    InvalidToken,
    ModelFileError,
    ModelNotFound,
    RequestError,
    TemplateError,
    UnknownOption,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8)
OPTIONS = {"device": "cpu", "dtype": "float32", "num_threads": 1}


@pytest.fixture(scope="module")
def engine(tiny):
    with Engine.from_pretrained(str(tiny.folder), max_model_len=100, **OPTIONS) as engine:
        yield engine


def refuse(engine, kind, prompts, params=GREEDY, *, says=()):
    with pytest.raises(kind) as caught:
        engine.generate(prompts, params)
    assert isinstance(caught.value, ForerunError)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    for part in says:
        assert str(part) in message
    assert not engine.machinery.scheduler.unfinished()


def test_a_prompt_longer_than_the_context(engine):
    for length in (100, 101, 5000):
        refuse(engine, ContextTooLong, [65] * length, says=[length, 100, "max_model_len"])
    (result,) = engine.generate([65] * 99, GREEDY)
    assert len(result.token_ids) == 1
    assert result.finish_reason == "length"


@pytest.mark.parametrize("prompts", ["", [""], [[]], ["fine", ""], [[65], []]])
def test_an_empty_prompt(engine, prompts):
    refuse(engine, EmptyPrompt, prompts)


def test_a_token_outside_the_vocabulary(engine, tiny):
    size = tiny.vocab_size
    for token in (-1, size, 2**63, -(2**70), 10**30):
        refuse(engine, InvalidToken, [65, token], says=[token, size - 1])
    assert engine.generate([65, size - 1], GREEDY)


def test_a_stop_token_outside_the_vocabulary(engine, tiny):
    size = tiny.vocab_size
    for token in (size, 2**63, 10**30):
        params = SamplingParams(stop_token_ids=[token])
        refuse(engine, InvalidToken, "hello", params, says=[token, size - 1])
    assert engine.generate("hello", SamplingParams(stop_token_ids=[size - 1], max_tokens=2))


@pytest.mark.parametrize(
    "prompts",
    [
        5,
        None,
        1.5,
        b"bytes are no text",
        [b"bytes are no text"],
        {"role": "user", "content": "a message alone"},
        [None],
        [1.5],
        ["text", 5],
        [65, "text"],
        [True, False],
        [[65, True]],
        [[65, 1.0]],
        [[65, None]],
        [["text", "text"], "text"],
        ...,
        {65, 66},
        [[[65]]],
    ],
    ids=repr,
)
def test_a_prompt_of_no_known_form(engine, prompts):
    refuse(engine, RequestError, prompts)


@pytest.mark.parametrize("prompt", [5, None, b"abc", [True], 1.5], ids=repr)
def test_a_streamed_prompt_of_no_known_form(engine, prompt):
    with pytest.raises(RequestError):
        list(engine.stream(prompt, GREEDY))


def test_half_a_surrogate_pair(engine):
    refuse(engine, InvalidParameter, "ab\ud800", says=["D800"])
    refuse(engine, RequestError, [{"role": "user", "content": "ab\ud800"}])


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, 5, "greedy", [None], [{"temperature": 0}], [GREEDY] * 2],
    ids=repr,
)
def test_parameters_of_no_known_form(engine, params):
    refuse(engine, RequestError, "hello", params)


def test_as_many_parameters_as_prompts(engine):
    refuse(engine, InvalidParameter, ["a", "b"], [GREEDY], says=[1, 2])


def test_messages_that_the_template_refuses(engine):
    refuse(engine, (TemplateError, InvalidParameter), [{"no": "role"}])


def test_nothing_starts_if_one_prompt_is_bad(engine):
    before = next(engine._ids)
    refuse(engine, InvalidToken, ["fine", "fine too", [10**6]])
    assert not engine._loop._sinks
    assert next(engine._ids) >= before


def test_numbers_from_numpy_are_numbers_or_refused(engine):
    """Never a crash further down."""
    for prompt in (np.array([65, 66]), [np.int64(65), np.int64(66)], [np.array([65])]):
        try:
            (result,) = engine.generate(prompt, GREEDY)
        except RequestError:
            continue
        assert len(result.token_ids) == 8


def test_the_engine_is_as_good_as_new_after_all_this(engine, tiny):
    (result,) = engine.generate("the quick brown fox", GREEDY)
    assert result.token_ids == tiny.plain(result.prompt_token_ids, GREEDY).token_ids
    pool = engine.machinery.scheduler._pool
    assert pool.num_free == pool.num_blocks


def open_engine(tiny, **options):
    Engine.from_pretrained(str(tiny.folder), **(OPTIONS | options)).close()


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"max_model_length": 5}, "max_model_len"),
        ({"draftr": "ngram"}, "drafter"),
        ({"max_drafts": 3}, "max_draft"),
        ({"devise": "cpu"}, "device"),
        ({"kv_cache_token": 5}, "kv_cache_tokens"),
        ({"speculation": {"num_speculative_token": 3}}, "num_speculative_tokens"),
        ({"speculation": {"prompt_lookup_maximum": 3}}, "prompt_lookup_max"),
    ],
)
def test_an_unknown_option_names_the_nearest(tiny, options, meant):
    with pytest.raises(UnknownOption, match=repr(meant)) as caught:
        open_engine(tiny, **options)
    assert isinstance(caught.value, TypeError)
    assert next(iter(options)) in str(caught.value) or "speculation" in options


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"max_model_len": 513}, "513"),
        ({"max_model_len": 0}, "0"),
        ({"max_model_len": -5}, "-5"),
        ({"max_num_seqs": 0}, "0"),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 4}, "3"),
        ({"block_size": 0}, "0"),
        ({"block_size": 2.5}, "2.5"),
        ({"max_draft": 65}, "65"),
        ({"max_draft": -1}, "-1"),
        ({"dtype": "int8"}, "int8"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": 5}, "5"),
        ({"kernels": "magic"}, "magic"),
        ({"kernels": "numba"}, "16"),
        ({"drafter": "n-gram"}, "n-gram"),
        ({"drafter": 5}, "5"),
        ({"drafter": ...}, "Ellipsis"),
        ({"enable_prefix_caching": "no"}, "no"),
        ({"num_threads": 0}, "0"),
        ({"speculation": 5}, "5"),
        ({"speculation": {"method": "ngram", "drafter": "ngram"}}, "twice"),
    ],
    ids=repr,
)
def test_a_setting_that_does_not_fit(tiny, options, number):
    with pytest.raises(ConfigError) as caught:
        open_engine(tiny, **options)
    assert number in str(caught.value)


def test_a_cache_too_small_for_one_request(tiny):
    with pytest.raises(CapacityError, match="512") as caught:
        open_engine(tiny, kv_cache_tokens=500)
    assert "500" in str(caught.value)
    open_engine(tiny, kv_cache_tokens=512)


def test_no_such_model(tmp_path):
    for name in ("no-such-model", str(tmp_path / "nothing"), ""):
        with pytest.raises(ForerunError):
            Engine.from_pretrained(name, **OPTIONS)
    with pytest.raises(ModelNotFound, match="nothing"):
        Engine.from_pretrained(str(tmp_path / "nothing"), **OPTIONS)


def test_a_model_folder_without_tokenizer(tiny, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder, folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Engine.from_pretrained(str(folder), **OPTIONS)


def test_an_engine_that_failed_to_start_leaves_no_thread(tiny):
    before = threading.active_count()
    with pytest.raises(CapacityError):
        open_engine(tiny, kv_cache_tokens=8)
    assert threading.active_count() == before
