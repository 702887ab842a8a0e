"""Starting contestants: which script with which interpreter, options and environment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contestants import Contestant
from .install import Places, missing
from .process import Worker, WorkerFailed, close_all
from .summary import PromptIds

__all__ = ["Settings", "command_for", "start_all"]

Report = Callable[[str], None]
START_TIMEOUT_S = 1800.0  # vLLM compiles when it starts for the first time
WARM_UP_TIMEOUT_S = 900.0
# What would decide for every contestant how many threads it has, and how they wait.
OMITTED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OMP_WAIT_POLICY")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same for everybody."""

    threads: int
    max_model_len: int
    max_concurrency: int  # most requests at once that will be asked
    eos_ids: tuple[int, ...]


def command_for(
    contestant: Contestant, dtype: str, places: Places, settings: Settings
) -> list[str]:
    """Write the command line of a contestant's worker."""
    kind = contestant.kind
    converted = places.converted(contestant.peer, dtype)
    options: dict[str, Any] = {
        "model": str(places.model),
        "converted": str(converted) if converted else None,
        "mode": contestant.mode,
        "draft": kind.draft if contestant.draft is None else contestant.draft,
        "ngram": kind.ngram,
        "dtype": dtype,
        "threads": settings.threads,
        "max_model_len": settings.max_model_len,
        "max_concurrency": settings.max_concurrency,
        "eos_ids": list(settings.eos_ids),
    }
    script = Path(__file__).with_name(kind.worker)
    return [str(places.python(contestant.peer)), str(script), json.dumps(options)]


def start_all(
    contestants: Sequence[tuple[Contestant, str]],
    places: Places,
    settings: Settings,
    warm_up: Sequence[PromptIds],
    log_folder: Path,
    report: Report,
) -> tuple[dict[str, Worker], dict[str, str]]:
    """Start and warm up one after the other: (workers by name, why others are missing)."""
    workers: dict[str, Worker] = {}
    failures: dict[str, str] = {}
    try:
        for contestant, dtype in contestants:
            name = str(contestant)
            reason = missing(places, contestant, dtype)
            if reason is None:
                report(f"starting {name}")
                command = command_for(contestant, dtype, places, settings)
                log = log_folder / f"{name.replace(':', '-').replace('@', '-')}.log"
                try:
                    environment = _environment(contestant.peer, places, settings.threads)
                    worker = Worker(command, environment, log, START_TIMEOUT_S)
                    workers[name] = worker
                    for prompt in warm_up:
                        request = {"prompt_ids": list(prompt.token_ids), "max_tokens": 16}
                        worker.ask(request, WARM_UP_TIMEOUT_S)
                except (WorkerFailed, OSError) as error:
                    reason = f"cannot run here: {error} (see {log})"
                    if name in workers:
                        workers.pop(name).close()
            if reason is not None:
                failures[name] = reason
                report(f"{name}: {reason}")
    except BaseException:
        close_all(workers.values())
        raise
    return workers, failures


def _environment(peer: str, places: Places, threads: int) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in OMITTED}
    environment["PYTHONUNBUFFERED"] = "1"
    if peer == "vllm":
        environment.setdefault("VLLM_CACHE_ROOT", str(places.root / "vllm" / "cache"))
        environment["OMP_NUM_THREADS"] = str(threads)  # it would take one thread otherwise
        if (openmp := places.openmp()) is not None:
            environment["LD_PRELOAD"] = str(openmp)
    return environment
