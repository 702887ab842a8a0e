"""The options of tokens, samples and log-probabilities: bounds, contradictions, own copies."""

from __future__ import annotations

import json
import math

import pytest

from forerun.errors import ForerunError, InvalidParameter, UnknownOption
from forerun.params import SamplingParams

NAN, INF = math.nan, math.inf


def refused(**options) -> str:
    """Return the message with which options are refused, by keyword and from a dict alike."""
    messages = set()
    for make in (lambda: SamplingParams(**options), lambda: SamplingParams.from_dict(options)):
        with pytest.raises(InvalidParameter) as caught:
            make()
        assert isinstance(caught.value, ForerunError)
        assert isinstance(caught.value, ValueError)
        assert caught.value.http_status == 400
        assert "\n" not in str(caught.value)
        messages.add(str(caught.value))
    (message,) = messages
    return message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("presence_penalty", "frequency_penalty")
          for value in (-2.01, 2.0001, NAN, INF, -INF, "1", None, True, 1j, [1])],
        *[("repetition_penalty", value)
          for value in (0, 0.0, 1e-40, 0.009, 100.5, 1e39, -1, -0.5, NAN, INF, "1", None, True)],
        *[("n", value) for value in (0, -1, 129, 10**9, 1.0, 2.5, NAN, "2", None, True)],
        *[("min_tokens", value) for value in (-1, 1.0, NAN, "2", None, True)],
        *[(name, value) for name in ("logprobs", "prompt_logprobs")
          for value in (-1, 21, 1.0, NAN, "5", True, False, [1])],
        *[("logprobs_mode", value)
          for value in ("", "Raw", "raw_logprobs", None, 1, True, ["raw"], b"raw")],
        *[("echo", value) for value in (0, 1, None, "yes", [])],
        *[(name, value) for name in ("allowed_token_ids", "banned_token_ids")
          for value in ([-1], [0, 1.0], ["1"], [True], [None], 5, "12", b"12", {1}, {1: 2},
                        [[1]], [NAN])],
        ("banned_token_ids", None),
        *[("bad_words", value)
          for value in ("", [""], ["a", ""], [5], 5, None, [None], b"a", [b"a"], {"a"})],
        *[("logit_bias", value)
          for value in (5, "5", None, {1}, True, [1], [(1,)], [(1, 2, 3)], ["12"], [{1: 2}])],
    ],
    ids=repr,
)  # fmt: skip
def test_refused(name, value):
    message = refused(**{name: value})
    assert name in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("presence_penalty", "frequency_penalty")
          for value in (-2, -2.0, 0, 2, 2.0, 0.1)],
        *[("repetition_penalty", value) for value in (0.01, 1, 1.0, 2, 50.0)],
        *[("n", value) for value in (1, 2, 128)],
        *[("min_tokens", value) for value in (0, 1, 256)],
        *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (None, 0, 1, 20)],
        *[("logprobs_mode", value) for value in ("raw", "processed")],
        *[("echo", value) for value in (True, False)],
        *[("allowed_token_ids", value) for value in (None, [0], (3, 3), [5, 10**9])],
        *[("banned_token_ids", value) for value in ([], (), [0], (3, 3))],
        *[("bad_words", value) for value in ((), [], "a", ["a", "b"], "\n", (" a",))],
    ],
    ids=repr,
)  # fmt: skip
def test_taken(name, value):
    expected = tuple(value) if isinstance(value, list) else value  # its own copy
    assert getattr(SamplingParams(**{name: value}), name) == expected


def test_defaults_ask_for_nothing():
    params = SamplingParams()
    assert params.bias_pairs == params.banned_token_ids == params.bad_word_strings == ()
    assert params.allowed_token_ids is None
    assert (params.min_tokens, params.n, params.repetition_penalty) == (0, 1, 1.0)
    assert (params.presence_penalty, params.frequency_penalty) == (0, 0)
    assert (params.logprobs, params.prompt_logprobs, params.logprobs_mode) == (None, None, "raw")
    assert params.echo is False


@pytest.mark.parametrize("bias", [NAN, INF, -INF, 100.001, -101, 1e300, "1", None, True, [1]])
@pytest.mark.parametrize("as_pairs", [False, True])
def test_biases_out_of_bounds(bias, as_pairs):
    message = refused(logit_bias=[(7, 1), (8, bias)] if as_pairs else {7: 1, 8: bias})
    assert "logit_bias" in message
    assert "8" in message


@pytest.mark.parametrize("token", [-1, 1.0, 1.5, None, True, "-1", "1.0", "x", "", " 1", "¹", "٣"])
def test_bias_ids_that_are_none(token):
    assert "logit_bias" in refused(logit_bias={token: 1.0})
    assert "logit_bias" in refused(logit_bias=[(token, 1.0)])


@pytest.mark.parametrize(
    "given", [[(5, 1), (5, 1)], [(5, 1), (6, 0), (5, -1)], {5: 1, "5": 2}, {"5": 1, "05": 1}]
)
def test_a_bias_given_twice(given):
    message = refused(logit_bias=given)
    assert "5" in message
    assert "twice" in message


@pytest.mark.parametrize(
    ("given", "pairs"),
    [
        ({}, ()), ([], ()), ((), ()),
        ({5: 1, 0: -100}, ((5, 1.0), (0, -100.0))),
        ({"5": 100, 7: -0.5}, ((5, 100.0), (7, -0.5))),
        ([[5, 1], (6, 2.5)], ((5, 1.0), (6, 2.5))),
        ((("5", 0),), ((5, 0.0),)),
    ],
)  # fmt: skip
def test_biases_of_every_form(given, pairs):
    params = SamplingParams(logit_bias=given)
    assert params.bias_pairs == pairs
    assert all(type(token) is int and type(bias) is float for token, bias in params.bias_pairs)


def test_from_json():
    text = (
        '{"logit_bias": {"50256": -100, "7": 2.5}, "allowed_token_ids": [1, 7], "n": 3,'
        ' "banned_token_ids": [2], "bad_words": ["a", "b"], "min_tokens": 2, "logprobs": 5,'
        ' "prompt_logprobs": 0, "logprobs_mode": "processed", "echo": true, "max_tokens": 9,'
        ' "presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.1}'
    )
    params = SamplingParams.from_dict(json.loads(text))
    assert params == SamplingParams(
        logit_bias={50256: -100, 7: 2.5}, allowed_token_ids=(1, 7), n=3, banned_token_ids=(2,),
        bad_words=("a", "b"), min_tokens=2, logprobs=5, prompt_logprobs=0, max_tokens=9,
        logprobs_mode="processed", echo=True, presence_penalty=1, frequency_penalty=-0.5,
        repetition_penalty=1.1,
    )  # fmt: skip
    assert params.bias_pairs == ((50256, -100.0), (7, 2.5))


@pytest.mark.parametrize(
    "options",
    [
        {"min_tokens": 257},  # the default max_tokens is 256
        {"min_tokens": 6, "max_tokens": 5},
        {"min_tokens": 1, "max_tokens": 0, "echo": True},
        {"allowed_token_ids": []},
        {"allowed_token_ids": ()},
        {"allowed_token_ids": [5], "banned_token_ids": [5]},
        {"allowed_token_ids": [5, 6, 5], "banned_token_ids": [7, 6, 5]},
        {"max_tokens": 0},
        {"max_tokens": 0, "logprobs": 5},
        {"max_tokens": -1, "echo": True},
        {"max_tokens": -1, "prompt_logprobs": 0},
    ],
)
def test_contradictions(options):
    message = refused(**options)
    assert next(iter(options)) in message


@pytest.mark.parametrize(
    "options",
    [
        {"min_tokens": 5, "max_tokens": 5},
        {"min_tokens": 10**6, "max_tokens": None},
        {"allowed_token_ids": [5, 6], "banned_token_ids": [5]},
        {"banned_token_ids": [5], "allowed_token_ids": None},
        {"max_tokens": 0, "echo": True},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"max_tokens": 0, "prompt_logprobs": 3, "logprobs": 2, "echo": False},
    ],
)
def test_no_contradictions(options):
    params = SamplingParams(**options)
    for name, value in options.items():
        got = getattr(params, name)
        assert (list(got) if isinstance(value, list) else got) == value


def test_lists_are_copied_at_birth():
    given = {
        "logit_bias": {5: 1.0}, "allowed_token_ids": [1, 2], "banned_token_ids": [2],
        "bad_words": ["a"], "stop": ["b"], "stop_token_ids": [9],
    }  # fmt: skip
    params = SamplingParams(**given)
    born = SamplingParams(**given)
    given["logit_bias"][6] = 500.0
    for name in ("allowed_token_ids", "banned_token_ids", "stop_token_ids"):
        given[name].append(-7)
    given["bad_words"].append("")
    given["stop"].clear()
    assert params == born
    assert params.bias_pairs == ((5, 1.0),)
    assert params.allowed_token_ids == (1, 2)
    assert params.banned_token_ids == (2,)
    assert (params.bad_word_strings, params.stop_strings) == (("a",), ("b",))
    pairs = [[5, 1.0]]
    params = SamplingParams(logit_bias=pairs)
    pairs[0][1] = NAN
    assert params.bias_pairs == ((5, 1.0),)


def test_params_are_hashable_and_equal_by_value():
    def make():
        return SamplingParams(
            logit_bias={5: 1, "6": 2}, allowed_token_ids=[1, 2], banned_token_ids=[2],
            bad_words=["a"], stop=["b"], stop_token_ids=[9], n=2, logprobs=1,
        )  # fmt: skip

    assert make() == make()
    assert hash(make()) == hash(make())
    assert len({make(), make(), SamplingParams(), SamplingParams(logit_bias={})}) == 2
    assert make() != SamplingParams()
    with pytest.raises(AttributeError):
        make().n = 3


def test_one_word_is_not_its_letters():
    assert SamplingParams(bad_words="the").bad_word_strings == ("the",)
    assert SamplingParams(bad_words=["the", "a"]).bad_word_strings == ("the", "a")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("logit_biases", "logit_bias"), ("allowed_tokens_ids", "allowed_token_ids"),
     ("bad_word", "bad_words"), ("min_token", "min_tokens"), ("logprob", "logprobs"),
     ("presence_penality", "presence_penalty"), ("repeat_penalty", "repetition_penalty"),
     ("prompt_logprob", "prompt_logprobs")],
)  # fmt: skip
def test_an_unknown_option_names_the_nearest(given, meant):
    with pytest.raises(UnknownOption, match=meant):
        SamplingParams.from_dict({given: 1})
