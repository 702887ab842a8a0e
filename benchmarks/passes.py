"""What one pass of the target costs over its number of rows, against its linear layers alone.

The floor of a pass is one scan of the weights. Rows are those of one request: a pass over m rows is
what verifying m - 1 draft tokens costs. Everything is interleaved; figures are medians.

    python benchmarks/passes.py --model smollm2-135m --contexts 400 1024 --rows 1 2 4 8 16 32
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from forerun.cache.kv_cache import KVCache
from forerun.device import available_cpus, choose_device, choose_dtype
from forerun.measure.provenance import provenance
from forerun.model.decoder import Decoder, load_decoder
from forerun.model.loader import open_model
from forerun.registry import resolve_model
from forerun.types import ForwardInput

BLOCK = 32


def load(model: str, dtype: str, threads: int, context: int) -> tuple[Decoder, KVCache]:
    files = open_model(resolve_model(model))
    device = choose_device("cpu")
    torch.set_num_threads(threads)
    decoder = load_decoder(
        files.config,
        files.weights,
        device=device,
        dtype=choose_dtype(dtype, device),
        max_positions=context,
        num_threads=threads,
    )
    return decoder, KVCache(decoder.cache_shape(BLOCK), -(-context // BLOCK), device)


def rows_at(context: int, num_rows: int) -> ForwardInput:
    return ForwardInput.of_one_request(torch.arange(num_rows) + 100, context, BLOCK)


def measure(decoder: Decoder, cache: KVCache, args: argparse.Namespace) -> list[dict[str, Any]]:
    cells = [(context, rows) for context in args.contexts for rows in args.rows]
    samples: dict[tuple[int, int, str], list[float]] = {}
    for context in args.contexts:  # fill the cache, so that attention reads real numbers
        decoder.forward(rows_at(0, context), cache)
    for repeat in range(args.repeats + 3):
        for context, rows in cells:
            step = rows_at(context, rows)
            times = {
                "pass": seconds(lambda step=step: decoder.forward(step, cache)),
                "linear": seconds(lambda rows=rows: decoder.run_linear_layers(rows)),
            }
            if repeat >= 3:  # the first ones warm up
                for name, taken in times.items():
                    samples.setdefault((context, rows, name), []).append(taken)
    result = []
    for context, rows in cells:
        whole, linear = samples[context, rows, "pass"], samples[context, rows, "linear"]
        one = statistics.median(samples[context, args.rows[0], "pass"])
        quartiles = statistics.quantiles(whole, n=4)
        result.append(
            {
                "context": context,
                "rows": rows,
                "pass_ms": round(statistics.median(whole) * 1e3, 2),
                "pass_iqr_ms": [round(quartiles[0] * 1e3, 2), round(quartiles[2] * 1e3, 2)],
                "linear_ms": round(statistics.median(linear) * 1e3, 2),
                "over_linear": round(statistics.median(whole) / statistics.median(linear), 3),
                "over_one_row": round(statistics.median(whole) / one, 3),
            }
        )
    return result


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--contexts", type=int, nargs="+", default=[400, 1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=21)
    args = parser.parse_args()
    decoder, cache = load(
        args.model, args.dtype, args.threads, max(args.contexts) + max(args.rows) + BLOCK
    )
    rows = measure(decoder, cache, args)
    print(f"{'context':>8}{'rows':>6}{'pass ms':>10}{'linear ms':>11}{'/linear':>9}{'/1 row':>8}")
    for row in rows:
        print(
            f"{row['context']:>8}{row['rows']:>6}{row['pass_ms']:>10}{row['linear_ms']:>11}"
            f"{row['over_linear']:>9}{row['over_one_row']:>8}"
        )
    described = {"model": args.model, "dtype": str(decoder.dtype), "kernels": decoder.kernels}
    print(json.dumps({"benchmark": "passes", **described, "rows": rows, **provenance()}))


if __name__ == "__main__":
    main()
