"""`forerun demo`: the same prompts plain and speculative. How fast, how often right, same text?"""

from __future__ import annotations

import json
import platform
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._version import __version__
from ..errors import ConfigError, ModelNotFound
from ..measure.compare import Row, measure, warm_up
from ..measure.prompts import DEMO_PROMPTS
from .demo_view import LineWatcher, LiveWatcher, make_table
from .loading import open_switched_engine
from .options import EngineOptions
from .pull import pull_with_progress
from .sampling_options import SamplingOptions
from .screen import is_terminal, out, spinner

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..measure.switch import SwitchedDrafter
    from ..params import SamplingParams

__all__ = ["demo"]

WARM_UP_TOKENS = 24
FRAMES_PER_S = 6  # drawing takes time from the measured engine


def demo(
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODEL", help="Pulled first if need be.")
    ] = "smollm2-135m",
    draft_tokens: Annotated[
        int | None, typer.Option("--draft-tokens", metavar="N", help="Most draft tokens per step.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", help="Most tokens of an answer.")
    ] = 160,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", help="Times that each prompt runs in each mode.")
    ] = 3,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Default: all processors at hand.")
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="NAME")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", metavar="NAME")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one line of JSON that holds every run.")
    ] = False,
) -> None:
    """Answer the same prompts plainly and speculatively.

    Shows what speculation is worth on this machine, and whether the texts are the same.
    """
    if rounds < 1:
        raise ConfigError(f"rounds={rounds} is under 1; nothing would be measured")
    options = EngineOptions(
        model=model, draft_tokens=draft_tokens, threads=threads, device=device, dtype=dtype
    )
    params = SamplingOptions(max_tokens=max_tokens).params(max_tokens=max_tokens)
    _pull_if_needed(model)
    engine, switch = open_switched_engine(options)
    with engine:
        with spinner("warming up ..."):
            short = SamplingOptions().params(max_tokens=WARM_UP_TOKENS)
            warm_up(engine, switch, DEMO_PROMPTS[0], short)
        rows = _watch(engine, switch, params, rounds)
        _print_results(rows, engine, model, rounds)
        if as_json:
            facts = _facts(engine, model) | {"rounds": rounds, "max_tokens": max_tokens}
            print(json.dumps({**facts, "rows": [row.to_dict() for row in rows]}))


def _pull_if_needed(model: str) -> None:
    from .. import registry

    try:
        registry.resolve_model(model)
    except ModelNotFound:
        if model not in registry.KNOWN:
            raise
        pull_with_progress(model)


def _watch(
    engine: Engine, switch: SwitchedDrafter, params: SamplingParams, num_rounds: int
) -> list[Row]:
    if not is_terminal(sys.stdout):
        return measure(engine, switch, DEMO_PROMPTS, params, num_rounds, LineWatcher())
    from rich.live import Live

    watcher = LiveWatcher(engine.codec, num_rounds)
    with Live(watcher, console=out, refresh_per_second=FRAMES_PER_S, transient=True):
        return measure(engine, switch, DEMO_PROMPTS, params, num_rounds, watcher)


def _print_results(rows: list[Row], engine: Engine, model: str, num_rounds: int) -> None:
    out.print(make_table(rows))
    facts = _facts(engine, model)
    for row in rows:
        if row.first_difference is not None:
            out.print(_explain_difference(row, facts["dtype"]))
    times = "one round" if num_rounds == 1 else f"median of {num_rounds} rounds"
    out.print(
        f"{model} in {facts['dtype']} with {facts['kernels']} kernels on {facts['machine']}, "
        f"{facts['num_threads']} threads; {times}, plain and speculative in turn, after a warm-up "
        "run of each that is not counted. Temperature 0. tokens/s is the decode rate: "
        "(tokens - 1) / (seconds from the first to the last). The mean acceptance length is the "
        "tokens per pass, the target's own included."
    )


def _explain_difference(row: Row, dtype: str) -> str:
    line = f"{row.title}: the texts differ from token {row.first_difference} on"
    if dtype == "float32":
        return f"{line}."
    return (
        f"{line}. In {dtype}, a pass over several tokens may round otherwise than one over a "
        "single token; --dtype float32 is exact far more often."
    )


def _facts(engine: Engine, model: str) -> dict[str, Any]:
    import torch

    from ..device import cpu_name

    machinery = engine.machinery
    on_cuda = machinery.device.type == "cuda"
    return {
        "model": model,
        "machine": torch.cuda.get_device_name(machinery.device) if on_cuda else cpu_name(),
        "dtype": str(machinery.dtype).removeprefix("torch."),
        "kernels": machinery.kernels,
        "num_threads": machinery.num_threads,
        "max_draft": engine.config.speculation.max_draft,
        "versions": {
            "forerun": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
