"""What the server adds to its own engine: closed loop, real prompts, clients in another process.

one       one request at a time: time to first token and time per output token (TPOT), of the
          engine called directly and through HTTP, in turn
load      N at a time, everybody in turn: output tokens a second of both
streams   N streams open at once: how many fail
soak      N at a time for so many seconds: the memory that the process holds

python benchmarks/server.py --model smollm2-135m
python benchmarks/server.py --only soak --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from http_load import Sample

from forerun import Engine, SamplingParams
from forerun.device import available_cpus
from forerun.measure.prompts import DEMO_PROMPTS, read_prompts
from forerun.measure.provenance import provenance
from forerun.server.config import ServerConfig
from forerun.server.run import make_server

PARTS = ("one", "load", "streams", "soak")


class Running:
    """An engine, and a server around it in a thread of this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.engine = Engine.from_pretrained(
            args.model,
            drafter=args.drafter,
            dtype=args.dtype,
            num_threads=args.threads,
            max_num_seqs=max(args.load),
            # A prefix found in the cache would spare the second run what the first one paid.
            enable_prefix_caching=False,
        )
        self.url = ""
        self._listening = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        if not self._listening.wait(30):
            raise SystemExit("the server did not begin to listen")
        worker = Path(__file__).with_name("http_load.py")
        self._worker = subprocess.Popen(
            [sys.executable, str(worker), self.url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    async def _serve(self) -> None:
        config = ServerConfig(model_names=("model",), port=0, max_queued_requests=1024)

        def listen(url: str) -> None:
            self.url = url
            self._listening.set()

        await make_server(self.engine, config, listen).serve()

    def through_http(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Sample]:
        """Have the client process send requests, so many at once; in their order."""
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(json.dumps([list(bodies), concurrency]) + "\n")
        self._worker.stdin.flush()
        return [Sample(**each) for each in json.loads(self._worker.stdout.readline())]


def body_of(messages: Sequence[dict[str, str]], tokens: int) -> dict[str, Any]:
    return {
        "messages": list(messages),
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def directly(engine: Engine, messages: Sequence[dict[str, str]], tokens: int) -> Sample:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    begin_s = time.perf_counter()
    first_s = None
    count = 0
    for chunk in engine.stream(list(messages), params):
        if first_s is None and chunk.token_ids:
            first_s = time.perf_counter()
        count += len(chunk.token_ids)
    end_s = time.perf_counter()
    assert first_s is not None
    return Sample(first_s - begin_s, end_s - begin_s, count, None)


def measure_one(running: Running, prompts: Sequence[Any], args: argparse.Namespace) -> Any:
    """Interleave both ways over every prompt; medians over prompts and rounds."""
    rows = []
    for number in range(args.rounds + 1):
        for messages in prompts:
            own = directly(running.engine, messages, args.tokens)
            (http,) = running.through_http([body_of(messages, args.tokens)], 1)
            if http.error:
                raise SystemExit(f"a request failed: {http.error}")
            if number:  # the first round warms up
                rows.append((own, http))
    ratios = [http.tpot_s / own.tpot_s for own, http in rows]
    extra_ms = [1e3 * (http.ttft_s - own.ttft_s) for own, http in rows]
    result = {
        "requests": len(rows),
        "engine_tpot_ms": round(1e3 * statistics.median(own.tpot_s for own, _ in rows), 3),
        "http_tpot_ms": round(1e3 * statistics.median(http.tpot_s for _, http in rows), 3),
        "tpot_ratio_median": round(statistics.median(ratios), 4),
        "ttft_added_ms_median": round(statistics.median(extra_ms), 2),
        "ttft_added_ms_spread": [round(min(extra_ms), 2), round(max(extra_ms), 2)],
        "tpot_ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
    }
    print(
        f"one at a time: TPOT {result['engine_tpot_ms']:.2f} ms directly, "
        f"{result['http_tpot_ms']:.2f} ms through HTTP: {result['tpot_ratio_median']:.3f} x; "
        f"TTFT + {result['ttft_added_ms_median']:.1f} ms"
    )
    return result


def measure_load(running: Running, prompts: Sequence[Any], args: argparse.Namespace) -> Any:
    """Output tokens a second, so many at a time, both ways in turn."""
    cells = []
    for concurrency in args.load:
        many = [prompts[i % len(prompts)] for i in range(2 * concurrency)]
        params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
        rates: dict[str, list[float]] = {"engine": [], "http": []}
        for _ in range(args.rounds):
            begin_s = time.perf_counter()
            waves = [many[i : i + concurrency] for i in range(0, len(many), concurrency)]
            count = sum(
                len(result.token_ids)
                for wave in waves
                for result in running.engine.generate(wave, params)
            )
            rates["engine"].append(count / (time.perf_counter() - begin_s))
            begin_s = time.perf_counter()
            count = 0
            for wave in waves:
                samples = running.through_http([body_of(m, args.tokens) for m in wave], concurrency)
                errors = [each.error for each in samples if each.error]
                if errors:
                    raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")
                count += sum(each.num_tokens for each in samples)
            rates["http"].append(count / (time.perf_counter() - begin_s))
        pairs = zip(rates["http"], rates["engine"], strict=True)
        ratios = [http / own for http, own in pairs]
        cells.append(
            {
                "concurrency": concurrency,
                "engine_tokens_per_s": round(statistics.median(rates["engine"]), 1),
                "http_tokens_per_s": round(statistics.median(rates["http"]), 1),
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
            }
        )
        print(
            f"{concurrency} at a time: {cells[-1]['engine_tokens_per_s']} tokens/s directly, "
            f"{cells[-1]['http_tokens_per_s']} through HTTP: {cells[-1]['ratio_median']:.3f} x"
        )
    return cells


def measure_streams(running: Running, prompts: Sequence[Any], args: argparse.Namespace) -> Any:
    """Open many streams at once."""
    bodies = [body_of(prompts[i % len(prompts)], 32) for i in range(args.streams)]
    samples = running.through_http(bodies, args.streams)
    failed = [each.error for each in samples if each.error]
    print(f"{args.streams} streams at once: {len(failed)} failed")
    return {"streams": args.streams, "failed": len(failed), "first_error": (failed or [None])[0]}


def resident_mib() -> float:
    """Read how much memory this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure_soak(running: Running, prompts: Sequence[Any], args: argparse.Namespace) -> Any:
    """Bounded load for a while; the resident memory of this process, a sample a wave."""
    points = []
    begin_s = time.perf_counter()
    number = failed = 0
    while (elapsed_s := time.perf_counter() - begin_s) < args.seconds:
        bodies = []
        for _ in range(16):
            body = body_of(prompts[number % len(prompts)], 8 + number % 25)
            body["messages"][-1] = {
                **body["messages"][-1],
                "content": f"({number}) " + body["messages"][-1]["content"],
            }
            bodies.append(body)
            number += 1
        failed += sum(bool(each.error) for each in running.through_http(bodies, 8))
        points.append([round(elapsed_s, 1), round(resident_mib(), 1)])
    quarter = max(1, len(points) // 4)
    early = statistics.median(mib for _, mib in points[quarter : 2 * quarter] or points)
    late = statistics.median(mib for _, mib in points[-quarter:])
    print(
        f"soak: {number} requests in {args.seconds:g} s, {failed} failed; "
        f"{early:.0f} MiB in the second quarter, {late:.0f} MiB in the last"
    )
    return {
        "requests": number,
        "failed": failed,
        "second_quarter_mib": early,
        "last_quarter_mib": late,
        "points": points[:: max(1, len(points) // 40)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--prompts", type=Path, help="a file of prompts; default: our own four")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=int, nargs="+", default=[32])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=["one", "load", "streams"])
    args = parser.parse_args()
    if args.prompts is None:
        prompts: list[Any] = [list(each.messages) for each in DEMO_PROMPTS]
    else:
        prompts = [list(each.messages) for each in read_prompts(args.prompts, args.limit)]
    running = Running(args)
    parts = {
        "one": measure_one,
        "load": measure_load,
        "streams": measure_streams,
        "soak": measure_soak,
    }
    found = {name: parts[name](running, prompts, args) for name in args.only}
    machinery = running.engine.machinery
    setting = {
        "model": args.model,
        "dtype": str(machinery.dtype).removeprefix("torch."),
        "kernels": machinery.kernels,
        "threads": machinery.num_threads,
        "drafter": args.drafter,
    }
    print(json.dumps({**setting, **found, "provenance": provenance()}))


if __name__ == "__main__":
    main()
