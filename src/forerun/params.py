"""What one request asks for: how to sample, when to stop. Validated once, never written again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from .errors import InvalidParameter, refuse_unknown

__all__ = ["SamplingParams"]

MAX_SEED = 2**64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one request, and when to stop.

    Filters apply in this order: temperature, min-p, top-k, top-p (vLLM's order). Defaults are the
    OpenAI convention: temperature 1, no filter.

    Raises:
        InvalidParameter: a value outside its range, with the value and the range.
        UnknownOption: a keyword that is not an option, with the nearest one that is.
    """

    temperature: float = 1.0  # 0 is greedy: always the most probable token
    top_k: int = 0  # keep the k most probable tokens; 0 (and -1, as vLLM writes it) keeps all
    top_p: float = 1.0  # keep the likeliest tokens until they add up to top_p; ties stay
    min_p: float = 0.0  # drop tokens under min_p times the most probable one's probability
    seed: int | None = None  # None: a fresh one for each request, reported in the result
    max_tokens: int | None = 256  # None: until the context is full
    stop: str | Sequence[str] = ()  # stop strings; the text ends before the first that appears
    stop_token_ids: Sequence[int] = ()  # stop tokens beside the model's own end-of-text
    ignore_eos: bool = False  # do not stop at the model's own end-of-text

    def __new__(cls, *_: Any, **given: Any) -> Self:
        # The generated __init__ would answer a misspelt option with a bare TypeError.
        refuse_unknown(given, (field.name for field in fields(cls)), cls.__name__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0, math.inf, open_high=True)
        check_number("top_p", self.top_p, 0, 1, open_low=True)
        check_number("min_p", self.min_p, 0, 1)
        check_integer("top_k", self.top_k, -1, None)
        if self.seed is not None:
            check_integer("seed", self.seed, 0, MAX_SEED - 1)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, None)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidParameter(f"ignore_eos={self.ignore_eos!r} is not true or false")
        check_stop_strings(self.stop)
        if not isinstance(self.stop_token_ids, list | tuple):
            raise InvalidParameter(f"stop_token_ids={self.stop_token_ids!r} is not a list of ids")
        for token in self.stop_token_ids:
            check_integer("stop_token_ids", token, 0, None)
        # The caller's lists may change later; what was checked must not. Still being born here.
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not isinstance(self.stop, str):
            object.__setattr__(self, "stop", tuple(self.stop))

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping, for example decoded JSON; unknown keys are refused."""
        return cls(**options)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def check_number(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise `InvalidParameter` unless `value` is a number between `low` and `high`."""
    bounds = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(f"{name}={value!r} is not a number; it must lie in {bounds}")
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if not (above and below):  # NaN fails both
        raise InvalidParameter(f"{name}={value!r} is outside {bounds}")


def check_integer(name: str, value: object, low: int, high: int | None) -> None:
    """Raise `InvalidParameter` unless `value` is an integer from `low` to `high`."""
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(f"{name}={value!r} is not an integer; it must be {bounds}")
    if value < low or (high is not None and value > high):
        raise InvalidParameter(f"{name}={value} is out of range; it must be {bounds}")


def check_stop_strings(stop: object) -> None:
    """Raise `InvalidParameter` unless `stop` is a non-empty string or a list of such."""
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple):
        raise InvalidParameter(f"stop={stop!r} is neither a string nor a list of strings")
    for index, text in enumerate(strings):
        if not isinstance(text, str):
            raise InvalidParameter(f"stop[{index}]={text!r} is not a string")
        if text == "":
            raise InvalidParameter(
                f"stop[{index}] is an empty string, which would stop before the first token; "
                "leave it out"
            )
