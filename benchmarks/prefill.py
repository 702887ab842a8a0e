"""How fast a prompt is computed, against a plain large matrix product in the same process.

    product   2 * m * n * k / s of one large matrix product of torch, in the fastest format here
    prefill   2 * parameters * tokens / s of a prompt's pieces through the decoder, with attention
    first     seconds from a prompt of the engine's to its first token

Interleaved; medians. Embeddings do no arithmetic and are left out; only the last token is projected
to the vocabulary.

    python benchmarks/prefill.py --model smollm2-135m --tokens 1024
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from forerun.cache.kv_cache import KVCache
from forerun.device import available_cpus, choose_dtype
from forerun.engine.engine import Engine
from forerun.measure.provenance import provenance
from forerun.model.decoder import load_decoder
from forerun.model.loader import open_model
from forerun.params import SamplingParams
from forerun.registry import resolve_model
from forerun.types import ForwardInput

BLOCK = 32
SIDE = 2048  # of the large product's matrices


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--piece", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cpu = torch.device("cpu")
    dtype = choose_dtype(args.dtype, cpu)
    files = open_model(resolve_model(args.model))
    decoder = load_decoder(
        files.config,
        files.weights,
        device=cpu,
        dtype=dtype,
        kernels=args.kernels,
        max_positions=args.tokens + BLOCK,
        num_threads=args.threads,
    )
    num_blocks = -(-args.tokens // BLOCK)
    cache = KVCache(decoder.cache_shape(BLOCK), num_blocks, cpu)
    pieces = [
        ForwardInput.of_one_request(
            torch.arange(first, min(first + args.piece, args.tokens)) + 100,
            first,
            BLOCK,
            last_only=True,
        )
        for first in range(0, args.tokens, args.piece)
    ]
    config = files.config
    parameters = config.num_parameters - config.vocab_size * config.hidden_size
    left, right = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
    # float32 where bfloat16 is emulated: what a large product reaches here at best
    fast = left.float(), right.float()

    def large() -> float:
        taken = min(seconds(lambda: left @ right), seconds(lambda: fast[0] @ fast[1]))
        return 2 * SIDE**3 / taken / 1e9

    def prefill() -> float:
        taken = seconds(lambda: [decoder.forward(each, cache) for each in pieces])
        return 2 * parameters * args.tokens / taken / 1e9

    pairs = [(large(), prefill()) for _ in range(args.repeats + 1)][1:]
    product, reached = (statistics.median(column) for column in zip(*pairs, strict=True))
    share = statistics.median(ours / theirs for theirs, ours in pairs)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with Engine.from_pretrained(
        args.model,
        drafter="none",
        dtype=args.dtype,
        kernels=args.kernels,
        num_threads=args.threads,
        enable_prefix_caching=False,
        max_num_batched_tokens=args.piece,
    ) as engine:
        prompt = [100 + i % 20_000 for i in range(args.tokens)]
        first = [
            engine.generate([prompt], params)[0].stats.ttft_s for _ in range(args.repeats + 1)
        ][1:]
        kernels = engine.machinery.kernels
    first_s = statistics.median(first)
    print(f"large product   {product:8.1f} GFLOP/s ({SIDE} x {SIDE} x {SIDE})")
    print(f"prefill         {reached:8.1f} GFLOP/s, {share:.0%} of it")
    print(
        f"first token     {first_s:8.3f} s for {args.tokens} tokens, {args.tokens / first_s:.0f}/s"
    )
    print(
        json.dumps(
            {
                "benchmark": "prefill",
                "model": args.model,
                "dtype": str(dtype),
                "kernels": kernels,
                "tokens": args.tokens,
                "piece": args.piece,
                "product_gflops": round(product, 1),
                "prefill_gflops": round(reached, 1),
                "share": round(share, 3),
                "ttft_s": round(first_s, 3),
                **provenance(),
            }
        )
    )


if __name__ == "__main__":
    main()
