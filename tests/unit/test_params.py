"""What a request may ask for: every bound, with the number in the message."""

from __future__ import annotations

import math

import pytest

from forerun.errors import ForerunError, InvalidParameter, UnknownOption
from forerun.params import SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", -1), ("temperature", NAN), ("temperature", INF),
        ("temperature", -INF), ("temperature", "1"), ("temperature", None), ("temperature", True),
        ("temperature", 1j),
        ("top_p", 0), ("top_p", 0.0), ("top_p", -0.5), ("top_p", 1.0000001), ("top_p", NAN),
        ("top_p", INF), ("top_p", "0.9"), ("top_p", None), ("top_p", True),
        ("min_p", -0.001), ("min_p", 1.001), ("min_p", NAN), ("min_p", None),
        ("top_k", -2), ("top_k", 1.5), ("top_k", NAN), ("top_k", True), ("top_k", "5"),
        ("seed", -1), ("seed", 2**64), ("seed", 1.5), ("seed", "x"), ("seed", True),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2.5), ("max_tokens", NAN),
        ("max_tokens", "9"), ("max_tokens", True),
        ("ignore_eos", 1), ("ignore_eos", None), ("ignore_eos", "yes"),
        ("stop", ""), ("stop", [""]), ("stop", ["a", ""]), ("stop", [5]), ("stop", 5),
        ("stop", None), ("stop", [None]), ("stop", b"a"), ("stop", [b"a"]), ("stop", {"a"}),
        ("stop_token_ids", [-1]), ("stop_token_ids", [1.5]), ("stop_token_ids", "12"),
        ("stop_token_ids", 5), ("stop_token_ids", None), ("stop_token_ids", [True]),
        ("stop_token_ids", {1}), ("stop_token_ids", b"ab"), ("stop_token_ids", ["1"]),
    ],
    ids=repr,
)  # fmt: skip
def test_refused(name, value):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert "\n" not in message
    if isinstance(value, int | float) and not isinstance(value, bool):
        assert repr(value) in message
    assert isinstance(caught.value, ForerunError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0), ("temperature", 0.0), ("temperature", 1e-300), ("temperature", 1e308),
        ("temperature", 2),
        ("top_p", 1), ("top_p", 1e-12), ("min_p", 0), ("min_p", 1),
        ("top_k", -1), ("top_k", 0), ("top_k", 1), ("top_k", 10**6),
        ("seed", 0), ("seed", 2**64 - 1), ("seed", None),
        ("max_tokens", 1), ("max_tokens", None), ("max_tokens", 10**12),
        ("stop", ()), ("stop", []), ("stop", "a"), ("stop", ["a", "b"]), ("stop", "\n"),
        ("stop_token_ids", []), ("stop_token_ids", (0, 5)),
    ],
    ids=repr,
)  # fmt: skip
def test_taken(name, value):
    expected = tuple(value) if isinstance(value, list) else value  # its own copy
    assert getattr(SamplingParams(**{name: value}), name) == expected


@pytest.mark.parametrize(
    ("given", "meant"),
    [("temprature", "temperature"), ("topp", "top_p"), ("max_token", "max_tokens"),
     ("stops", "stop"), ("stop_ids", "stop_token_ids"), ("Seed", "seed")],
)  # fmt: skip
def test_an_unknown_option_names_the_nearest(given, meant):
    for make in (
        lambda: SamplingParams(**{given: 1}),
        lambda: SamplingParams.from_dict({given: 1}),
    ):
        with pytest.raises(UnknownOption, match=given) as caught:
            make()
        assert meant in str(caught.value)


def test_an_option_like_no_other_lists_them_all():
    with pytest.raises(UnknownOption, match=r"temperature.*top_p"):
        SamplingParams(zzzzzz=1)


def test_they_are_frozen():
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.temperature = 5
    with pytest.raises((AttributeError, TypeError)):
        params.nonsense = 5


def test_stop_strings_are_a_tuple_in_any_form():
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_what_was_given_can_change_without_changing_them():
    """Validated once, never written again: not through the caller's own list either."""
    stop, ids = ["a"], [5]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("")
    ids.append(-7)
    assert params.stop_strings == ("a",)
    assert tuple(params.stop_token_ids) == (5,)


def test_greedy_is_temperature_zero():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams().is_greedy


def test_from_dict_takes_what_json_gives():
    params = SamplingParams.from_dict({"temperature": 0.5, "stop": ["x"], "max_tokens": None})
    assert (params.temperature, params.stop_strings, params.max_tokens) == (0.5, ("x",), None)


def test_equal_options_are_equal_params():
    assert SamplingParams(seed=1) == SamplingParams(seed=1) != SamplingParams(seed=2)
