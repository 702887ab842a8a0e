"""What speculation is worth offline, at batch 1: the figures of the README.

    decode    plain and speculative tokens/s for four kinds of prompt, interleaved, same text or not
    passes    what a pass over m rows costs against one row (m - 1 drafts verified)
    start     seconds from starting the program to the first token, caches warm
    memory    peak memory of a process that fills a context of 8k tokens

    python benchmarks/offline.py [--model smollm2-135m] [--only decode passes start memory]

Prints a table for each, and one JSON object with provenance as the last line. `--prompts FILE`
takes other prompts: JSON lines with "prompt" or "turns" (its first is used) and maybe "category".
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.config import SpeculationConfig
from forerun.engine.engine import Engine
from forerun.measure.compare import Row, measure, warm_up
from forerun.measure.prompts import DEMO_PROMPTS, read_prompts
from forerun.measure.provenance import provenance
from forerun.measure.switch import switched_engine
from forerun.params import SamplingParams

SECTIONS = ("decode", "passes", "start", "memory")
MEMORY_CONTEXT = 8192


class Quiet:
    """Watch the runs and say only which one is over."""

    def begin(self, title: str, *, speculative: bool, round_number: int) -> None:
        """Say nothing."""

    def take(self, chunk: object) -> None:
        """Say nothing."""

    def end(self, run: object) -> None:
        print(".", end="", file=sys.stderr, flush=True)

    def conclude(self, row: Row) -> None:
        print(f" {row.title}", file=sys.stderr)


def decode(args: argparse.Namespace) -> dict[str, Any]:
    prompts = read_prompts(Path(args.prompts), args.limit) if args.prompts else list(DEMO_PROMPTS)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=1)
    asked = {"drafter": args.drafter}
    if args.draft_tokens is not None:
        asked["max_draft"] = args.draft_tokens
    speculation = SpeculationConfig.from_dict(asked)
    engine, switch = switched_engine(args.model, speculation, num_threads=args.threads)
    with engine:
        warm_up(engine, switch, prompts[0], params)
        rows = measure(engine, switch, prompts, params, args.rounds, Quiet())
        machinery = engine.machinery
    heads = f"{'plain':>8}{'spec.':>8}{'speedup':>9}{'accepted':>10}{'tok/pass':>10}  same"
    print(f"\n{'prompt':<16}{heads}")
    for row in rows:
        same_text = "yes" if row.first_difference is None else "no"
        print(
            f"{row.title[:15]:<16}"
            f"{row.plain_tokens_per_s:>8.1f}{row.speculative_tokens_per_s:>8.1f}"
            f"{row.speedup:>8.2f}x{row.draft_acceptance_rate:>10.0%}"
            f"{row.mean_acceptance_length:>10.2f}  {same_text}"
        )
    total = {mode: _seconds(rows, mode == "speculative") for mode in ("plain", "speculative")}
    speedup = total["plain"] / total["speculative"]
    same = sum(row.first_difference is None for row in rows)
    print(f"{'all':<16}{'':>16}{speedup:>8.2f}x{'':>20}  {same}/{len(rows)}")
    return {
        "rows": [row.to_dict() | {"runs": len(row.runs)} for row in rows],
        "speedup_of_totals": speedup,
        "same_text": same,
        "dtype": str(machinery.dtype),
        "kernels": machinery.kernels,
        "threads": machinery.num_threads,
    }


def _seconds(rows: list[Row], speculative: bool) -> float:
    """Add up decode seconds: total time, not a mean of rates."""
    stats = [run.result.stats for row in rows for run in row.runs if run.speculative == speculative]
    return sum(each.e2e_s - each.ttft_s for each in stats)


def passes(args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("passes.py")), "--model", args.model]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *table, last = done.stdout.strip().splitlines()
    print("\n" + "\n".join(table))
    return {"rows": json.loads(last)["rows"]}


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Time whole processes from launch to the first token on their standard output."""
    command = [sys.executable, "-m", "forerun", "generate", "--model", args.model, "--stream"]
    command += ["--prompt", "Hello", "--max-tokens", "64"]
    with tempfile.TemporaryDirectory() as empty:  # kernels are compiled, the model file is warm
        cold_s = _first_token_s(command, os.environ | {"NUMBA_CACHE_DIR": empty})
    _first_token_s(command, os.environ)
    warm = [_first_token_s(command, os.environ) for _ in range(args.rounds)]
    median_s = statistics.median(warm)
    print(
        f"\nstart to first token: {median_s:.2f} s (of {len(warm)}, caches warm); "
        f"{cold_s:.2f} s where the kernels have to be compiled first"
    )
    return {"median_s": median_s, "runs_s": warm, "compiling_s": cold_s}


def _first_token_s(command: list[str], environment: Mapping[str, str]) -> float:
    begin = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        taken = time.perf_counter() - begin
        process.kill()
    return taken


def memory(args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", args.model, "--only", "fill-context"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"\npeak memory at {result['tokens']} tokens: {result['peak_bytes'] / 2**20:.0f} MiB")
    return result


def fill_context(args: argparse.Namespace) -> None:
    """Compute a whole context in this process, and print its peak memory."""
    with Engine.from_pretrained(args.model, max_model_len=MEMORY_CONTEXT) as engine:
        text = "The quick brown fox jumps over the lazy dog. " * 2000
        tokens = engine.encode(text)[: MEMORY_CONTEXT - 64]
        (result,) = engine.generate(
            [tokens], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"tokens": len(tokens) + len(result.token_ids), "peak_bytes": peak_bytes}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--draft-tokens", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", help="JSON lines to take prompts from")
    parser.add_argument("--limit", type=int, help="prompts of each category")
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS, "fill-context"], default=SECTIONS)
    args = parser.parse_args()
    if args.only == ["fill-context"]:
        fill_context(args)
        return
    run = {"decode": decode, "passes": passes, "start": start, "memory": memory}
    results = {name: run[name](args) for name in SECTIONS if name in args.only}
    print(json.dumps({"benchmark": "offline", "model": args.model, **results, **provenance()}))


if __name__ == "__main__":
    main()
