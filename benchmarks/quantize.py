"""What weights of eight bits give and what they cost, against the same model's own.

passes    a pass over m rows, none and int8 interleaved: medians in milliseconds
closeness over the prompts that come with forerun: Kullback-Leibler divergence of the next
          token's distribution, and how often the likeliest token is the same

python benchmarks/quantize.py --model smollm2-135m --rows 1 2 4 8 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from forerun.cache.kv_cache import KVCache
from forerun.device import available_cpus, choose_dtype
from forerun.engine.setup import make_codec
from forerun.measure.prompts import DEMO_PROMPTS
from forerun.measure.provenance import provenance
from forerun.model.decoder import Decoder, load_decoder
from forerun.model.loader import open_model
from forerun.registry import resolve_model
from forerun.types import ForwardInput

BLOCK = 32
FORMATS = ("none", "int8")


def seconds(decoder: Decoder, step: ForwardInput, cache: KVCache) -> float:
    begin = time.perf_counter()
    decoder.forward(step, cache)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    cpu = torch.device("cpu")
    torch.set_num_threads(args.threads)
    files = open_model(resolve_model(args.model))
    codec = make_codec(files)
    prompts = [torch.tensor(codec.encode_chat(list(each.messages))) for each in DEMO_PROMPTS]
    longest = max(args.context + max(args.rows), *map(len, prompts))
    decoders = [
        load_decoder(
            files.config,
            files.weights,
            device=cpu,
            dtype=choose_dtype(args.dtype, cpu),
            kernels="compiled",
            max_positions=longest,
            num_threads=args.threads,
            quantize=each,
        )
        for each in FORMATS
    ]
    caches = [KVCache(each.cache_shape(BLOCK), -(-longest // BLOCK), cpu) for each in decoders]

    divergences, same = [], []
    for prompt in prompts:
        step = ForwardInput.of_one_request(prompt, 0, BLOCK)
        own, rounded = (
            decoder.forward(step, cache).log_softmax(-1)
            for decoder, cache in zip(decoders, caches, strict=True)
        )
        divergences += (own.exp() * (own - rounded)).sum(-1).tolist()
        same += (own.argmax(-1) == rounded.argmax(-1)).tolist()
    cells = []
    print(f"{'rows':>6}{'none ms':>10}{'int8 ms':>10}{'none/int8':>11}{'int8/1 row':>12}")
    for rows in args.rows:
        step = ForwardInput.of_one_request(torch.arange(rows) + 100, args.context, BLOCK)
        pairs = [
            [seconds(decoder, step, cache) for decoder, cache in zip(decoders, caches, strict=True)]
            for _ in range(args.repeats + 2)
        ][2:]
        none_ms, int8_ms = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        cells.append({"rows": rows, "none_ms": round(none_ms, 2), "int8_ms": round(int8_ms, 2)})
        over = int8_ms / cells[0]["int8_ms"]
        print(f"{rows:>6}{none_ms:>10.1f}{int8_ms:>10.1f}{none_ms / int8_ms:>11.2f}{over:>12.2f}")
    divergence, agreement = statistics.mean(divergences), statistics.mean(same)
    print(f"divergence {divergence:.4f}, same likeliest token {agreement:.1%}, {len(same)} tokens")
    print(
        json.dumps(
            {
                "benchmark": "quantize",
                "model": args.model,
                "dtype": str(decoders[0].dtype),
                "context": args.context,
                "passes": cells,
                "kl_divergence": round(divergence, 5),
                "same_argmax": round(agreement, 4),
                **provenance(),
            }
        )
    )


if __name__ == "__main__":
    main()
