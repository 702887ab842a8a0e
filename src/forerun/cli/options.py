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
from typing import Annotated, Any, get_type_hints

import typer

from ..errors import ConfigError

__all__ = ["EngineOptions", "option", "takes_groups"]


def option(*names: str, help: str, metavar: str | None = None) -> Any:
    """Describe an option whose default stands in its help."""
    return typer.Option(*names, help=help, metavar=metavar, show_default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Which model, which drafter, on what."""

    model: Annotated[
        str,
        option("--model", "-m", metavar="MODEL", help="A pulled name, a folder, or a .gguf file."),
    ]
    drafter: Annotated[
        str | None,
        option(
            "--drafter",
            metavar="NAME",
            help="auto, ngram, suffix, draft-model, eagle, medusa or none. Default: auto.",
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        option(
            "--draft-model",
            metavar="MODEL",
            help="The draft model or head: a pulled name, a folder, or a .gguf file.",
        ),
    ] = None
    draft_tokens: Annotated[
        int | None,
        option("--draft-tokens", metavar="N", help="Most draft tokens per step. Default: 15."),
    ] = None
    accept_rule: Annotated[
        str | None,
        option(
            "--accept-rule",
            metavar="NAME",
            help="auto, point_mass, token or block; none changes the output. Default: auto.",
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        option(
            "--speculative-config",
            metavar="JSON",
            help="The same and more, in the keys of forerun or vLLM.",
        ),
    ] = None
    max_model_len: Annotated[
        int | None, option("--max-model-len", metavar="N", help="Longest context, in tokens.")
    ] = None
    device: Annotated[
        str, option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N. Default: auto.")
    ] = "auto"
    dtype: Annotated[
        str,
        option(
            "--dtype",
            metavar="NAME",
            help="auto, bfloat16, float16 or float32. Default: auto.",
        ),
    ] = "auto"
    exact_bits: Annotated[
        str,
        option(
            "--exact-bits",
            metavar="WHEN",
            help="auto, on or off: the same bits alone and in company. Default: auto, where cheap.",
        ),
    ] = "auto"
    kernels: Annotated[
        str,
        option("--kernels", metavar="NAME", help="auto, compiled, numba or torch. Default: auto."),
    ] = "auto"
    quantize: Annotated[
        str,
        option(
            "--quantize",
            metavar="FORMAT",
            help="none or int8: weights of eight bits, faster. They change what the model says; "
            "drafts do not. Default: none.",
        ),
    ] = "none"
    threads: Annotated[
        int | None, option("--threads", metavar="N", help="Default: all processors at hand.")
    ] = None

    def speculation(self) -> dict[str, Any]:
        """Merge the ways to describe the drafter; one setting given twice is an error."""
        config = _read_config(self.speculative_config)
        for name, key, spellings in (
            ("drafter", "drafter", ("drafter", "method")),
            ("draft_tokens", "max_draft", ("max_draft", "num_speculative_tokens")),
            ("draft_model", "model", ("model",)),
            ("accept_rule", "accept_rule", ("accept_rule",)),
        ):
            value = getattr(self, name)
            twice = next((each for each in spellings if each in config), None)
            if value is not None and twice is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} and {twice!r} in --speculative-config say the "
                    "same; give one of them"
                )
            if value is not None:
                config[key] = value
        return config


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
