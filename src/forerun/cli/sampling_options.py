"""The options that say how to sample, when to stop and what to report, as groups of a command."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import InvalidParameter
from .options import option

if TYPE_CHECKING:
    from ..params import SamplingParams

__all__ = ["ReportOptions", "SamplingOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How to sample, and when to stop."""

    temperature: Annotated[
        float,
        option(
            "--temperature",
            metavar="T",
            help="Default: 0, the most probable token each time, so the same text each time.",
        ),
    ] = 0.0
    top_p: Annotated[float, option("--top-p", metavar="P", help="Keep the likeliest P.")] = 1.0
    top_k: Annotated[int, option("--top-k", metavar="K", help="Keep the K likeliest.")] = 0
    min_p: Annotated[
        float, option("--min-p", metavar="P", help="Drop what is under P times the likeliest.")
    ] = 0.0
    typical_p: Annotated[
        float, option("--typical-p", metavar="P", help="Keep P of the most typical surprise.")
    ] = 1.0
    presence_penalty: Annotated[
        float, option("--presence-penalty", metavar="X", help="Against tokens of the answer.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, option("--frequency-penalty", metavar="X", help="The same for each time they came.")
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        option("--repetition-penalty", metavar="X", help="Divides logits of tokens seen. 1: off."),
    ] = 1.0
    logit_bias: Annotated[
        str | None,
        option("--logit-bias", metavar="JSON", help='Added to logits: {"token id": bias}.'),
    ] = None
    allowed_token_ids: Annotated[
        list[str] | None,
        option("--allowed-token-ids", metavar="IDS", help="Only these tokens: 2,7 or repeated."),
    ] = None
    banned_token_ids: Annotated[
        list[str] | None,
        option("--banned-token-ids", metavar="IDS", help="None of these: 2,7 or repeated."),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        option("--bad-words", metavar="WORD", help="Never this word. May be repeated."),
    ] = None
    seed: Annotated[
        int | None, option("--seed", metavar="N", help="The same seed gives the same text.")
    ] = None
    min_tokens: Annotated[
        int, option("--min-tokens", metavar="N", help="Do not stop before so many tokens.")
    ] = 0
    max_tokens: Annotated[
        int | None,
        option("--max-tokens", metavar="N", help="Most tokens of an answer. See below."),
    ] = None
    stop: Annotated[
        list[str] | None,
        option("--stop", metavar="TEXT", help="End before this text. May be repeated."),
    ] = None
    stop_token_ids: Annotated[
        list[str] | None,
        option("--stop-token-ids", metavar="IDS", help="End at these tokens: 2,7 or repeated."),
    ] = None
    ignore_eos: Annotated[
        bool, option("--ignore-eos", help="Go on past the model's own end-of-text.")
    ] = False

    def params(self, *, max_tokens: int, report: ReportOptions | None = None) -> SamplingParams:
        """Check the options as a whole; `max_tokens` holds where the option was not given."""
        from ..params import SamplingParams

        wanted: dict[str, Any] = {} if report is None else report.wanted()
        allowed = self.allowed_token_ids
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            typical_p=self.typical_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_read_bias(self.logit_bias),
            allowed_token_ids=None if allowed is None else _read_ids("allowed_token_ids", allowed),
            banned_token_ids=_read_ids("banned_token_ids", self.banned_token_ids or []),
            bad_words=tuple(self.bad_words or ()),
            seed=self.seed,
            min_tokens=self.min_tokens,
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=_read_ids("stop_token_ids", self.stop_token_ids or []),
            ignore_eos=self.ignore_eos,
            **wanted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """How many answers, and what to say of them."""

    n: Annotated[
        int, option("--n", metavar="N", help="So many answers; a JSON line each. Default: 1.")
    ] = 1
    logprobs: Annotated[
        int | None,
        option("--logprobs", metavar="K", help="In JSON: log-probabilities, and the K likeliest."),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        option("--prompt-logprobs", metavar="K", help="The same of prompt tokens."),
    ] = None
    logprobs_mode: Annotated[
        str,
        option(
            "--logprobs-mode",
            metavar="MODE",
            help="raw: the model's own; processed: what was sampled from. Default: raw.",
        ),
    ] = "raw"
    echo: Annotated[bool, option("--echo", help="Begin the text with the prompt's.")] = False

    @property
    def needs_json(self) -> bool:
        return self.n > 1 or self.logprobs is not None or self.prompt_logprobs is not None

    def wanted(self) -> dict[str, Any]:
        """List these options under their names in `SamplingParams`."""
        return {
            "n": self.n,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs,
            "logprobs_mode": self.logprobs_mode,
            "echo": self.echo,
        }


def _read_bias(text: str | None) -> Any:
    if text is None:
        return ()
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidParameter(f"logit_bias={text!r} is not JSON: {error}") from None


def _read_ids(name: str, texts: list[str]) -> tuple[int, ...]:
    ids = []
    for piece in (piece for text in texts for piece in text.split(",")):
        try:
            ids.append(int(piece))
        except ValueError:
            raise InvalidParameter(f"{name}={piece!r} is not an integer; give ids as 2,7") from None
    return tuple(ids)
