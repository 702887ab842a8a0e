"""The options that commands share, as dataclasses whose fields become options of a command.

    @takes_groups
    def chat(engine: EngineOptions, sampling: SamplingOptions) -> None: ...

has one `--option` for each field of both. Ranges are checked where they are known: in `params`,
`config` and the engine.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..errors import ConfigError, InvalidParameter

if TYPE_CHECKING:
    from ..params import SamplingParams

__all__ = ["EngineOptions", "SamplingOptions", "takes_groups"]


def _option(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, show_default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Which model, which drafter, on what."""

    model: Annotated[
        str,
        _option("--model", "-m", metavar="MODEL", help="A pulled name, a folder, or a .gguf file."),
    ]
    drafter: Annotated[
        str | None,
        _option("--drafter", metavar="NAME", help="auto, ngram or none. Default: auto."),
    ] = None
    draft_tokens: Annotated[
        int | None,
        _option("--draft-tokens", metavar="N", help="Most draft tokens per step. Default: 15."),
    ] = None
    speculative_config: Annotated[
        str | None,
        _option(
            "--speculative-config",
            metavar="JSON",
            help="The same and more, in the keys of forerun or vLLM.",
        ),
    ] = None
    max_model_len: Annotated[
        int | None, _option("--max-model-len", metavar="N", help="Longest context, in tokens.")
    ] = None
    device: Annotated[
        str, _option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N. Default: auto.")
    ] = "auto"
    dtype: Annotated[
        str,
        _option(
            "--dtype",
            metavar="NAME",
            help="auto, bfloat16, float16 or float32. Default: auto.",
        ),
    ] = "auto"
    kernels: Annotated[
        str, _option("--kernels", metavar="NAME", help="auto, torch or numba. Default: auto.")
    ] = "auto"
    threads: Annotated[
        int | None, _option("--threads", metavar="N", help="Default: all processors at hand.")
    ] = None

    def speculation(self) -> dict[str, Any]:
        """Merge the three ways to describe the drafter; one setting given twice is an error."""
        config = _read_config(self.speculative_config)
        for option, key, spellings in (
            ("drafter", "drafter", ("drafter", "method")),
            ("draft_tokens", "max_draft", ("max_draft", "num_speculative_tokens")),
        ):
            value = getattr(self, option)
            twice = next((each for each in spellings if each in config), None)
            if value is not None and twice is not None:
                raise ConfigError(
                    f"--{option.replace('_', '-')} and {twice!r} in --speculative-config say the "
                    "same; give one of them"
                )
            if value is not None:
                config[key] = value
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How to sample, and when to stop."""

    temperature: Annotated[
        float,
        _option(
            "--temperature",
            metavar="T",
            help="Default: 0, the most probable token each time, so the same text each time.",
        ),
    ] = 0.0
    top_p: Annotated[float, _option("--top-p", metavar="P", help="Keep the likeliest P.")] = 1.0
    top_k: Annotated[int, _option("--top-k", metavar="K", help="Keep the K likeliest.")] = 0
    min_p: Annotated[
        float, _option("--min-p", metavar="P", help="Drop what is under P times the likeliest.")
    ] = 0.0
    seed: Annotated[
        int | None, _option("--seed", metavar="N", help="The same seed gives the same text.")
    ] = None
    max_tokens: Annotated[
        int | None,
        _option("--max-tokens", metavar="N", help="Most tokens of an answer. See below."),
    ] = None
    stop: Annotated[
        list[str] | None,
        _option("--stop", metavar="TEXT", help="End before this text. May be repeated."),
    ] = None
    stop_token_ids: Annotated[
        list[str] | None,
        _option("--stop-token-ids", metavar="IDS", help="End at these tokens: 2,7 or repeated."),
    ] = None
    ignore_eos: Annotated[
        bool, _option("--ignore-eos", help="Go on past the model's own end-of-text.")
    ] = False

    def params(self, *, max_tokens: int) -> SamplingParams:
        """Check the options as a whole; `max_tokens` holds where the option was not given."""
        from ..params import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(_read_ids(self.stop_token_ids or [])),
            ignore_eos=self.ignore_eos,
        )


def takes_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command one parameter for each field of the dataclasses that it takes."""
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _fields_as_parameters(groups[name])
        else:
            parameters.append(
                parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name])
            )

    @functools.wraps(function)
    def command(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        function(**given)

    del command.__wrapped__  # typer would look through to the signature that it cannot read
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _fields_as_parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in fields(group)
    ]


def _read_config(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(
            '--speculative-config must be a JSON object such as {"method": "ngram"}, '
            f"not {text!r}"
        )
    return config


def _read_ids(texts: list[str]) -> list[int]:
    ids = []
    for piece in (piece for text in texts for piece in text.split(",")):
        try:
            ids.append(int(piece))
        except ValueError:
            raise InvalidParameter(
                f"stop_token_ids={piece!r} is not an integer; give ids as 2,7"
            ) from None
    return ids
