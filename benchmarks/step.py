"""Where every microsecond of a step goes, against the floor measured in the same process.

    floor    the linear layers alone over the same rows; memory bandwidth beside it
    parts    schedule, draft, build, plan, forward, decide, commit, and what the loop adds around

A live engine is watched: each part is timed where it is called, nothing is played back. Requests
decode greedily (or as `--temperature` says) from prompts of `--context` tokens; the first steps
and those that compute prompts are left out. Medians in microseconds.

    python benchmarks/step.py --model smollm2-135m --requests 1 8 32 --drafts 0 3
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import forerun.engine.core as core_module
from forerun.draft.base import NoDrafter
from forerun.engine.core import EngineCore
from forerun.engine.engine import Engine
from forerun.engine.runner import TargetRunner
from forerun.engine.scheduler import Scheduler
from forerun.measure.provenance import provenance
from forerun.params import SamplingParams
from forerun.types import Proposal

PARTS = ("schedule", "draft", "build", "forward", "decide", "commit")
WARM_UP_STEPS = 8


class Watch:
    """Times of the parts of each step, in order."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._open: dict[str, float] = {}
        self._ended_s: float | None = None

    def part(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args, **options)
            self._open[name] = self._open.get(name, 0.0) + time.perf_counter() - begin
            return result

        return timed

    def whole(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            between = 0.0 if self._ended_s is None else begin - self._ended_s
            self._open = {}
            result = call(*args, **options)
            self._ended_s = time.perf_counter()
            self.steps.append({**self._open, "step": self._ended_s - begin, "between": between})
            return result

        return timed


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Time the parts of every step of every engine while this lasts."""
    places: list[tuple[Any, str, str]] = [
        (Scheduler, "schedule", "schedule"),
        (core_module, "build_batch", "build"),
        (core_module, "decide", "decide"),
        (TargetRunner, "forward", "forward"),
        (EngineCore, "_commit", "commit"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    originals.append((EngineCore, "step", EngineCore.step))
    for owner, name, part in places:
        setattr(owner, name, watch.part(part, getattr(owner, name)))
    EngineCore.step = watch.whole(EngineCore.step)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


class Wrong(NoDrafter):
    """Drafts of a fixed length that are nearly always refused: rows per step stay the same."""

    def __init__(self, length: int, watch: Watch) -> None:
        self._length = length
        self.propose = watch.part("draft", self.propose)  # type: ignore[method-assign]

    def propose(self, requests: Any) -> Proposal:
        return Proposal.from_lists(
            [[11 + 7 * i for i in range(min(self._length, each.max_draft))] for each in requests]
        )


def measure(args: argparse.Namespace, requests: int, drafts: int) -> dict[str, Any]:
    watch = Watch()
    with watched(watch):
        engine = Engine.from_pretrained(
            args.model,
            drafter=Wrong(drafts, watch),
            max_draft=drafts or 1,
            dtype=args.dtype,
            num_threads=args.threads,
            kernels=args.kernels,
        )
        with engine:
            rng = np.random.default_rng(0)
            prompts = [rng.integers(100, 40_000, args.context).tolist() for _ in range(requests)]
            params = SamplingParams(
                temperature=args.temperature, max_tokens=args.steps, ignore_eos=True, seed=1
            )
            engine.generate(prompts, params)
            decoder = engine.machinery.runner.decoder
            rows = requests * (drafts + 1)
            floor = [_seconds(lambda: decoder.run_linear_layers(rows)) for _ in range(15)][3:]
            kernels, dtype = engine.machinery.kernels, str(engine.machinery.dtype)
    # Steps that compute prompts are longer than three times the usual one.
    usual = statistics.median(each["step"] for each in watch.steps)
    steps = [
        each
        for each in watch.steps[WARM_UP_STEPS:-2]
        if each["step"] < 3 * usual and "decide" in each
    ]
    found = {
        part: statistics.median(each.get(part, 0.0) for each in steps) * 1e6
        for part in (*PARTS, "step", "between")
    }
    found["other"] = found["step"] - sum(found[part] for part in PARTS)
    floor_us = statistics.median(floor) * 1e6
    return {
        "requests": requests,
        "rows": rows,
        "steps": len(steps),
        "kernels": kernels,
        "dtype": dtype,
        "floor_us": round(floor_us),
        **{f"{part}_us": round(us) for part, us in found.items()},
        "over_floor": round((found["step"] + found["between"]) / floor_us, 3),
        "host_share": round(1 - found["forward"] / (found["step"] + found["between"]), 4),
    }


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def bandwidth_gb_per_s(size: int = 1 << 28) -> float:
    """Read memory from front to back in one thread: the best of five."""
    data = np.ones(size // 8)
    return max(size / _seconds(data.sum) for _ in range(5)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    args = parser.parse_args()
    columns = ("floor", *PARTS, "other", "step", "between")
    print(
        f"{'requests':>8}{'rows':>6}"
        + "".join(f"{each:>10}" for each in columns)
        + "  /floor  host"
    )
    cells = []
    for requests in args.requests:
        for drafts in args.drafts:
            cell = measure(args, requests, drafts)
            cells.append(cell)
            numbers = "".join(f"{cell[f'{each}_us']:>10}" for each in columns)
            print(
                f"{requests:>8}{cell['rows']:>6}{numbers}{cell['over_floor']:>8}{cell['host_share']:>7.1%}",
                flush=True,
            )
    print(
        json.dumps(
            {
                "benchmark": "step",
                "model": args.model,
                "context": args.context,
                "one_thread_read_gb_per_s": round(bandwidth_gb_per_s(), 1),
                "cells": cells,
                **provenance(),
            }
        )
    )


if __name__ == "__main__":
    main()
