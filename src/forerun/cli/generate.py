"""`forerun generate`: one prompt or a file of them, answered once. stdout holds nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, TemplateError
from .loading import open_engine
from .options import EngineOptions, takes_groups
from .prompt_input import Message, PromptOptions, chat_messages
from .sampling_options import ReportOptions, SamplingOptions
from .screen import describe_stats, err, is_terminal, printable, say_note

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.results import GenerationResult
    from ..params import SamplingParams

__all__ = ["generate"]

MAX_TOKENS = 256  # unless asked for more


@takes_groups
def generate(
    engine: EngineOptions,
    source: PromptOptions,
    sampling: SamplingOptions,
    report: ReportOptions,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON: text, token_ids, stats, ...")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Say on stderr how fast it was and what drafts did.")
    ] = False,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Print text as it comes, or whole. Default: as it comes, on a terminal.",
        ),
    ] = None,
) -> None:
    """Answer a prompt and end. The text goes to stdout, everything else to stderr.

    Answers have at most 256 tokens unless --max-tokens says otherwise.
    """
    source.check()
    params = sampling.params(max_tokens=MAX_TOKENS, report=report)
    if report.needs_json and not as_json and source.prompts is None:
        raise ConfigError("--n, --logprobs and --prompt-logprobs are told in JSON; add --json")
    if as_json and stream:
        raise ConfigError("--stream prints text and --json prints JSON; give one of them")
    if source.prompts is not None:
        prompts = source.read_many()
        with open_engine(engine) as opened:
            _answer_many(opened, engine.model, prompts, source, params, stats=stats)
        return
    text = source.read_one()
    live = is_terminal(sys.stdout) if stream is None else stream
    with open_engine(engine) as opened:
        prompt = _shape_prompt(opened, text, source)
        if as_json or not live:
            results = opened.generate([prompt], params)
        else:
            results = [_stream(opened, prompt, params)]
        for result in results:
            if result.error is not None:
                raise result.error
            if as_json:
                print(json.dumps(_to_dict(result, engine.model)))
            elif not live:
                _write_text(result.text)
        if stats:
            _print_stats(results)


def _shape_prompt(engine: Engine, text: str, source: PromptOptions) -> str | list[Message]:
    """Make a chat of a prompt, unless it is to be raw or the model has no template."""
    if source.chat is False:
        return text
    try:
        _ = engine.codec.chat_template
    except TemplateError as error:
        if source.chat or source.system is not None:
            raise
        say_note(f"{error}; continuing the text as it is")
        return text
    return chat_messages(text, source.system)


def _stream(
    engine: Engine, prompt: str | list[Message], params: SamplingParams
) -> GenerationResult:
    result = None
    ends_line = True
    with closing(engine.stream(prompt, params)) as chunks:
        for chunk in chunks:
            _write(chunk.text)
            ends_line = chunk.text.endswith("\n") if chunk.text else ends_line
            result = chunk.result
    if not ends_line:
        _write("\n")
    assert result is not None, "the last chunk carries the result"
    return result


def _answer_many(
    engine: Engine,
    model: str,
    prompts: Sequence[str | list[Message]],
    source: PromptOptions,
    params: SamplingParams,
    *,
    stats: bool,
) -> None:
    shaped = [_shape_prompt(engine, p, source) if isinstance(p, str) else p for p in prompts]
    results = engine.generate(shaped, params)
    for index, result in enumerate(results):
        failed = None if result.error is None else str(result.error)
        line = {"index": index // params.n, **_to_dict(result, model), "error": failed}
        print(json.dumps(line))
    if stats:
        _print_stats(results)
    failures = [result.error for result in results if result.error is not None]
    if failures:
        raise failures[0]


def _to_dict(result: GenerationResult, model: str) -> dict[str, Any]:
    line = {
        "model": model,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "stats": result.stats.to_dict(),
    }
    if result.params.n > 1:
        line["sample_index"] = result.sample_index
    for name in ("logprobs", "prompt_logprobs"):
        if (told := getattr(result, name)) is not None:
            line[name] = [asdict(each) for each in told]
    return line


def _print_stats(results: Sequence[GenerationResult]) -> None:
    for line in describe_stats([result.stats for result in results]):
        err.print(line, soft_wrap=True)


def _write_text(text: str) -> None:
    _write(text if text.endswith("\n") else text + "\n")


def _write(text: str) -> None:
    sys.stdout.write(printable(text) if is_terminal(sys.stdout) else text)
    sys.stdout.flush()
