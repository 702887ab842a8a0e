"""What a pass costs on a GPU: as it is, captured, and the floor of its linear layers alone.

    eager    every kernel launched by the host, requests of like sizes in groups
    graphed  padded to a shape and replayed: what an engine runs for steps of few rows
    engine   tokens a second, greedy, without drafts and with n-gram drafts, and whether they agree

Passes are laid out on the host as an engine lays them out, and timed until their logits are read.
Medians. Without a CUDA device it says so and measures nothing; `--rehearse` runs all of it on the
CPU instead, to try the script: its figures mean nothing.

    python benchmarks/cuda.py --model smollm2-135m --requests 1 8 32 --rows 1 4 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from forerun import Engine, SamplingParams
from forerun.cache.kv_cache import KVCache
from forerun.measure.provenance import provenance
from forerun.model.decoder import load_decoder
from forerun.model.graphs import CudaCapture, GraphedDecoder
from forerun.model.layered import LayeredDecoder
from forerun.model.loader import open_model
from forerun.registry import resolve_model
from forerun.types import ForwardInput

BLOCK = 32
WARM_UP = 3
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TEXTS = [
    "The three rivers of the valley meet at the old mill. The three rivers of the valley",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "Once upon a time there was a",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,",
]


def lay_out(requests: int, rows: int, context: int) -> ForwardInput:
    """Lay out `rows` tokens after `context` positions of each request, on the host."""
    blocks = -(-(context + rows) // BLOCK)
    count = requests * rows
    return ForwardInput(
        token_ids=torch.arange(count) % 1000 + 100,
        positions=(context + torch.arange(rows)).repeat(requests),
        starts=torch.arange(requests + 1) * rows,
        block_tables=torch.arange(requests * blocks).view(requests, blocks),
        logit_rows=torch.arange(count),
        num_fine=count,
        num_sampling_rows=count,
    )


def median_us(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Time a call until the device is done with it."""
    times = []
    for turn in range(repeats + WARM_UP):
        _wait(device)
        begin = time.perf_counter()
        call()
        _wait(device)
        if turn >= WARM_UP:
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_passes(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    files = open_model(resolve_model(args.model))
    decoder = load_decoder(
        files.config, files.weights, device=device, dtype=DTYPES[args.dtype], kernels="torch"
    )
    assert isinstance(decoder, LayeredDecoder)
    most = max(args.requests) * -(-(max(args.contexts) + max(args.rows)) // BLOCK)
    cache = KVCache(decoder.cache_shape(BLOCK), most + 1, device)
    capture = CudaCapture(device) if device.type == "cuda" else lambda run: run
    graphed = GraphedDecoder(decoder, cache, most, capture)
    cells = []
    print(f"{'requests':>8}{'rows':>6}{'context':>9}{'floor':>9}{'eager':>9}{'graphed':>9}  us")
    for requests in args.requests:
        for rows in args.rows:
            for context in args.contexts:
                step = lay_out(requests, rows, context)
                before = len(graphed.shapes)
                cell = {
                    "requests": requests,
                    "rows_each": rows,
                    "context": context,
                    "floor_us": _time(lambda n=requests * rows: decoder.run_linear_layers(n), args),
                    "eager_us": _time(lambda step=step: decoder.forward(step, cache), args),
                    "graphed_us": _time(lambda step=step: graphed.forward(step), args),
                    "new_shape": len(graphed.shapes) > before,
                }
                difference = graphed.forward(step) - decoder.forward(step, cache)
                cell["largest_difference"] = float(difference.abs().max())
                cells.append(cell)
                print(
                    f"{requests:>8}{rows:>6}{context:>9}{cell['floor_us']:>9}{cell['eager_us']:>9}"
                    f"{cell['graphed_us']:>9}",
                    flush=True,
                )
    return cells


def _time(call: Callable[[], object], args: argparse.Namespace) -> int:
    return round(median_us(call, torch.device(args.device), args.repeats))


def measure_engine(args: argparse.Namespace) -> dict[str, Any]:
    """Run the same prompts without drafts and with n-gram drafts."""
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    rates, texts = {}, []
    for drafter in ("none", "ngram"):
        with Engine.from_pretrained(
            args.model, device=args.device, dtype=args.dtype, drafter=drafter, kernels="torch"
        ) as engine:
            engine.generate(TEXTS, params)  # captures its shapes
            begin = time.perf_counter()
            results = engine.generate(TEXTS, params)
            seconds = time.perf_counter() - begin
        texts.append([result.token_ids for result in results])
        rates[f"{drafter}_tokens_per_s"] = round(sum(map(len, texts[-1])) / seconds, 1)
    same = float(np.mean([one == other for one, other in zip(*texts, strict=True)]))
    found = {"requests": len(TEXTS), **rates, "same_answers": same}
    print(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[400, 2000])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, to try the script")
    args = parser.parse_args()
    found: dict[str, Any] = {"benchmark": "cuda", "model": args.model, "dtype": args.dtype}
    if torch.cuda.is_available() or args.rehearse:
        args.device = "cpu" if args.rehearse else "cuda"
        found["gpu"] = None if args.rehearse else torch.cuda.get_device_name()
        found["measured"] = not args.rehearse
        found["passes"] = measure_passes(args, torch.device(args.device))
        found["engine"] = measure_engine(args)
    else:
        print("there is no CUDA device here: nothing was measured")
        found |= {"gpu": None, "measured": False}
    print(json.dumps({**found, **provenance()}))


if __name__ == "__main__":
    main()
