"""What equal bits cost: passes with exact_bits on against off, at one and eight requests.

throughput on/off at 1 row a request is that of plain decoding; more rows are drafts being verified.
Both decoders live in one thread and take turns; figures are medians.

    python benchmarks/exact_bits.py --model smollm2-135m [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from forerun.cache.kv_cache import KVCache
from forerun.device import available_cpus, choose_device, choose_dtype
from forerun.measure.provenance import provenance
from forerun.model.bits import ExactRows, try_rows
from forerun.model.decoder import Decoder, load_decoder
from forerun.model.layered import linear_shapes
from forerun.model.loader import open_model
from forerun.registry import resolve_model
from forerun.types import ForwardInput

BLOCK = 32
CONTEXT = 384
MOST_ROWS = 512
CELLS = [(1, 1), (1, 4), (1, 8), (1, 16), (8, 1), (8, 4), (8, 16)]  # requests, rows of each
WARM_UPS = 3


def load(model: str, dtype: torch.dtype, threads: int, exact: ExactRows | None) -> Decoder:
    files = open_model(resolve_model(model))
    return load_decoder(
        files.config,
        files.weights,
        device=choose_device("cpu"),
        dtype=dtype,
        max_positions=CONTEXT + MOST_ROWS,
        num_threads=threads,
        exact=exact,
        most_rows=MOST_ROWS,
    )


def step(num_requests: int, rows: int, start: int, *, is_prompt: bool = False) -> ForwardInput:
    blocks = -(-(start + rows) // BLOCK)
    total = num_requests * rows
    last = torch.arange(1, num_requests + 1) * rows - 1
    return ForwardInput(
        token_ids=torch.arange(total) % 1000 + 100,
        positions=torch.arange(start, start + rows).repeat(num_requests),
        starts=torch.arange(num_requests + 1) * rows,
        block_tables=torch.arange(num_requests * blocks).reshape(num_requests, blocks),
        logit_rows=last if is_prompt else torch.arange(total),
        num_fine=0 if is_prompt else total,
        num_sampling_rows=num_requests if is_prompt else total,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = choose_dtype(args.dtype, choose_device("cpu"))
    config = open_model(resolve_model(args.model)).config
    found = try_rows(linear_shapes(config), dtype, MOST_ROWS)
    decoders = {
        "off": load(args.model, dtype, args.threads, None),
        "on": load(args.model, dtype, args.threads, found),
    }
    num_blocks = 8 * -(-(CONTEXT + 16) // BLOCK) + MOST_ROWS // BLOCK
    cells = {f"{requests} x {rows}": step(requests, rows, CONTEXT) for requests, rows in CELLS}
    cells["prompt of 512"] = step(1, MOST_ROWS, 0, is_prompt=True)
    caches = {}
    for name, decoder in decoders.items():
        caches[name] = KVCache(decoder.cache_shape(BLOCK), num_blocks, decoder.device)
        decoder.forward(step(1, MOST_ROWS, 0, is_prompt=True), caches[name])
    samples: dict[tuple[str, str], list[float]] = {}
    for repeat in range(args.repeats + WARM_UPS):
        for cell, batch in cells.items():
            for name, decoder in decoders.items():
                begin = time.perf_counter()
                decoder.forward(batch, caches[name])
                if repeat >= WARM_UPS:
                    samples.setdefault((cell, name), []).append(time.perf_counter() - begin)
    rows = []
    print(f"{'requests x rows':>16}{'off ms':>9}{'on ms':>9}{'throughput on/off':>20}")
    for cell in cells:
        off, on = (statistics.median(samples[cell, name]) * 1e3 for name in ("off", "on"))
        pairs = zip(samples[cell, "off"], samples[cell, "on"], strict=True)
        ratios = statistics.quantiles([a / b for a, b in pairs], n=4)
        print(
            f"{cell:>16}{off:>9.1f}{on:>9.1f}{ratios[1]:>12.3f} [{ratios[0]:.2f}-{ratios[2]:.2f}]"
        )
        rows.append({"cell": cell, "off_ms": off, "on_ms": on, "throughput_quartiles": ratios})
    described = {
        "model": args.model,
        "dtype": str(dtype),
        "min_rows": [[*shape, fewest] for shape, fewest in found.min_rows],
        "max_rows": found.max_rows,
        "cost_found_at_start": found.cost,
        "context": CONTEXT,
    }
    print(json.dumps({"benchmark": "exact_bits", **described, "rows": rows, **provenance()}))


if __name__ == "__main__":
    main()
