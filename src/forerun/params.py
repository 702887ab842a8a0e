"""What one request asks for: how to sample, when to stop. Validated once, never written again."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from .constraint import Constraint
from .errors import InvalidParameter, refuse_unknown

__all__ = ["SamplingParams"]

MAX_SEED = 2**64
MAX_SAMPLES = 128
MAX_PENALTY = 2.0  # the OpenAI convention's bounds
REPETITION_BOUNDS = (0.01, 100.0)  # far enough for anybody, and float32 holds the result
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
LOGPROBS_MODES = ("raw", "processed")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one request, and when to stop.

    Order, as in vLLM: allowed and banned tokens, bad words and min_tokens; logit bias; repetition,
    frequency and presence penalty; temperature; min-p, top-k, top-p; typical-p last. Defaults are
    the OpenAI convention: temperature 1, nothing else.

    Raises:
        InvalidParameter: a value outside its range, with the value and the range.
        UnknownOption: a keyword that is not an option, with the nearest one that is.
    """

    temperature: float = 1.0  # 0 is greedy: always the most probable token
    top_k: int = 0  # keep the k most probable tokens; 0 (and -1, as vLLM writes it) keeps all
    top_p: float = 1.0  # keep the likeliest tokens until they add up to top_p; ties stay
    min_p: float = 0.0  # drop tokens under min_p times the most probable one's probability
    typical_p: float = 1.0  # keep the tokens of most typical surprise that add up to typical_p
    presence_penalty: float = 0.0  # taken once from the logit of a token that the output holds
    frequency_penalty: float = 0.0  # taken from it for each time that the output holds it
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or output
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()  # kept as pairs
    allowed_token_ids: Sequence[int] | None = None  # nothing else can be sampled; None: anything
    banned_token_ids: Sequence[int] = ()  # these cannot be sampled
    bad_words: str | Sequence[str] = ()  # words whose tokens are never completed, as encoded alone
    min_tokens: int = 0  # no end-of-text, stop token or stop string before so many output tokens
    seed: int | None = None  # None: a fresh one for each request, reported in the result
    n: int = 1  # answers to the prompt, each with its own noise
    max_tokens: int | None = 256  # None: until the context is full; 0: only the prompt
    stop: str | Sequence[str] = ()  # stop strings; the text ends before the first that appears
    stop_token_ids: Sequence[int] = ()  # stop tokens beside the model's own end-of-text
    ignore_eos: bool = False  # do not stop at the model's own end-of-text
    logprobs: int | None = None  # say each sampled token's log-probability, and so many likeliest
    prompt_logprobs: int | None = None  # the same for each token of the prompt
    # raw: of the model's own distribution (OpenAI, vLLM); processed: of what was sampled from
    logprobs_mode: str = "raw"
    echo: bool = False  # the text begins with the prompt's
    skip_special_tokens: bool = True  # control tokens have no text
    max_draft: int | None = None  # most draft tokens a step; 0: no drafts. None: as the engine does
    constraint: Constraint | None = None  # what the output must look like (extra "structured")
    priority: int = 0  # who waits less: the lowest number first, as in vLLM
    cache_salt: str = ""  # computed prompts are shared with requests of the same salt alone

    def __new__(cls, *_: Any, **given: Any) -> Self:
        # The generated __init__ would answer a misspelt option with a bare TypeError.
        refuse_unknown(given, (field.name for field in fields(cls)), cls.__name__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0, math.inf, open_high=True)
        check_number("top_p", self.top_p, 0, 1, open_low=True)
        check_number("min_p", self.min_p, 0, 1)
        check_integer("top_k", self.top_k, -1, None)
        check_number("typical_p", self.typical_p, 0, 1, open_low=True)
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        check_number("repetition_penalty", self.repetition_penalty, *REPETITION_BOUNDS)
        if self.seed is not None:
            check_integer("seed", self.seed, 0, MAX_SEED - 1)
        if self.max_draft is not None:
            check_integer("max_draft", self.max_draft, 0, None)
        check_integer("n", self.n, 1, MAX_SAMPLES)
        check_integer("min_tokens", self.min_tokens, 0, None)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise InvalidParameter(
                f"logprobs_mode={self.logprobs_mode!r} is not one of {', '.join(LOGPROBS_MODES)}"
            )
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise InvalidParameter(f"constraint={self.constraint!r} is not a Constraint")
        check_integer("priority", self.priority, -(2**31), 2**31 - 1)
        if not isinstance(self.cache_salt, str):
            raise InvalidParameter(f"cache_salt={self.cache_salt!r} is not a string")
        for name in ("ignore_eos", "echo", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"{name}={getattr(self, name)!r} is not true or false")
        self._check_lengths()
        check_strings("stop", self.stop)
        check_strings("bad_words", self.bad_words)
        # The caller's lists may change later; what was checked must not. Still being born here.
        freeze = functools.partial(object.__setattr__, self)
        for name in ("stop_token_ids", "banned_token_ids"):
            freeze(name, check_ids(name, getattr(self, name)))
        freeze("logit_bias", check_bias(self.logit_bias))
        for name in ("stop", "bad_words"):
            if not isinstance(getattr(self, name), str):
                freeze(name, tuple(getattr(self, name)))
        if self.allowed_token_ids is not None:
            freeze("allowed_token_ids", check_ids("allowed_token_ids", self.allowed_token_ids))
            self._check_something_is_left()

    def _check_lengths(self) -> None:
        if self.max_tokens is None:
            return
        scores = self.prompt_logprobs is not None or self.echo
        if self.max_tokens == 0 and not scores:
            raise InvalidParameter(
                "max_tokens=0 asks for nothing; it must be at least 1, unless prompt_logprobs or "
                "echo is set"
            )
        check_integer("max_tokens", self.max_tokens, 0 if scores else 1, None)
        if self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}"
            )

    def _check_something_is_left(self) -> None:
        assert self.allowed_token_ids is not None
        if not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids is empty, so no token could be sampled")
        if set(self.allowed_token_ids) <= set(self.banned_token_ids):
            raise InvalidParameter(
                "every token of allowed_token_ids is in banned_token_ids too, so no token could be "
                "sampled"
            )

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

    @property
    def bad_word_strings(self) -> tuple[str, ...]:
        return (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words)

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """The logit bias as (token id, bias) pairs, as it is kept after checking."""
        assert isinstance(self.logit_bias, tuple), "check_bias made it one"
        return self.logit_bias


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


def check_strings(name: str, given: object) -> None:
    """Raise `InvalidParameter` unless `given` is a non-empty string or a list of such."""
    strings = [given] if isinstance(given, str) else given
    if not isinstance(strings, list | tuple):
        raise InvalidParameter(f"{name}={given!r} is neither a string nor a list of strings")
    for index, text in enumerate(strings):
        if not isinstance(text, str):
            raise InvalidParameter(f"{name}[{index}]={text!r} is not a string")
        if text == "":
            raise InvalidParameter(
                f"{name}[{index}] is an empty string, which every text holds; leave it out"
            )


def check_ids(name: str, given: object) -> tuple[int, ...]:
    """Copy a list of token ids; raise `InvalidParameter` unless it is one."""
    if not isinstance(given, list | tuple):
        raise InvalidParameter(f"{name}={given!r} is not a list of ids")
    for token in given:
        check_integer(name, token, 0, None)
    return tuple(given)


def check_bias(given: object) -> tuple[tuple[int, float], ...]:
    """Copy a logit bias, {token id: bias}; JSON's keys are strings, so "50256" is an id too."""
    if isinstance(given, Mapping):
        pairs: Sequence[Any] = list(given.items())
    elif isinstance(given, list | tuple):
        pairs = given
    else:
        raise InvalidParameter(f"logit_bias={given!r} is not a mapping of token ids to numbers")
    checked: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InvalidParameter(f"logit_bias holds {pair!r}, which is no (token id, bias)")
        token, bias = pair
        if isinstance(token, str) and token.isascii() and token.isdigit():
            token = int(token)
        check_integer("logit_bias: token id", token, 0, None)
        check_number(f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS)
        if token in checked:
            raise InvalidParameter(f"logit_bias names token {token} twice")
        checked[token] = float(bias)
    return tuple(checked.items())
