"""What sampling and accepting cost: filters, draws and acceptance rules on a step's logits.

One step of 32 requests with 8 drafts each: 288 rows over a vocabulary of 49,152. Kernels against
plain torch, interleaved; figures are medians. With `--model` one verification pass of those rows is
timed too, and its own logits are what is sampled; without it logits are normal random numbers.

    python benchmarks/acceptance.py [--model smollm2-135m] [--requests 32] [--drafts 8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forerun.cache.kv_cache import KVCache
from forerun.device import available_cpus, choose_device, choose_dtype
from forerun.measure.provenance import provenance
from forerun.model.decoder import load_decoder
from forerun.model.loader import open_model
from forerun.params import SamplingParams
from forerun.registry import resolve_model
from forerun.sampling import (
    FilterParams,
    Noise,
    accept_block,
    accept_tokens,
    bad_rows,
    filtered_probs,
    sample_tokens,
)
from forerun.sampling.filters import torch_weights
from forerun.sampling.rules import block, token
from forerun.sampling.sampler import torch_sample
from forerun.types import ForwardInput, Proposal

BLOCK = 32
WARM_UP = 2
FILTERS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "+ top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "+ top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "+ min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "+ all three": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.05),
}
Calls = dict[str, Callable[[], object]]


def sampling_calls(logits: Tensor, slow: bool) -> Calls:
    noise = torch.rand(len(logits), dtype=torch.float64)
    calls: Calls = {"bad_rows": lambda: bad_rows(logits)}
    for name, asked in FILTERS.items():
        params = FilterParams.from_params([asked] * len(logits))
        calls[f"sample: {name}"] = lambda p=params: sample_tokens(logits, p, noise)
        if slow:
            calls[f"torch: {name}"] = lambda p=params: torch_sample(logits, p, noise)
    return calls


def rule_calls(logits: Tensor, requests: int, drafts: int, slow: bool) -> Calls:
    """Drafts from a distribution near the target's, so that about half of them survive."""
    params = FilterParams.from_params([FILTERS["temperature 0.8"]] * len(logits))
    noise = Noise(
        torch.rand(len(logits), dtype=torch.float64),
        torch.rand(requests, drafts, dtype=torch.float64),
        torch.rand(requests, dtype=torch.float64),
    )
    judged = logits.view(requests, drafts + 1, -1)[:, :drafts].reshape(requests * drafts, -1)
    near = FilterParams.from_params([SamplingParams(temperature=1.2)] * len(judged))
    probs = filtered_probs(judged, near)
    tokens = sample_tokens(judged, near, torch.rand(len(judged), dtype=torch.float64))
    proposal = Proposal(
        tokens.view(requests, drafts),
        torch.full((requests,), drafts),
        probs.view(requests, drafts, -1),
    )
    target = filtered_probs(logits, params)
    calls: Calls = {
        "filtered_probs": lambda: filtered_probs(logits, params),
        "token, from logits": lambda: token(logits, params, proposal, noise),
        "block, from logits": lambda: block(logits, params, proposal, noise),
        "accept_tokens, from probs": lambda: accept_tokens(
            target, proposal, noise.accept, noise.recover
        ),
        "accept_block, from probs": lambda: accept_block(
            target, proposal, noise.accept, noise.recover
        ),
    }
    if slow:
        calls["torch: weights"] = lambda: torch_weights(logits, params)
    return calls


class Model:
    """A model with a cache for each request, for one verification pass."""

    def __init__(self, args: argparse.Namespace) -> None:
        files = open_model(resolve_model(args.model))
        device = choose_device("cpu")
        self._requests, self._rows, self._context = args.requests, args.drafts + 1, args.context
        length = args.context + self._rows
        self._decoder = load_decoder(
            files.config,
            files.weights,
            device=device,
            dtype=choose_dtype("auto", device),
            max_positions=length,
            num_threads=args.threads,
        )
        self._blocks = -(-length // BLOCK)
        shape = self._decoder.cache_shape(BLOCK)
        self._cache = KVCache(shape, self._blocks * args.requests, device)
        for request in range(args.requests):  # so that attention reads real numbers
            self._decoder.forward(self._step([request], 0, args.context), self._cache)

    def verify(self) -> Tensor:
        """Run all rows of all requests: [M, V]."""
        step = self._step(list(range(self._requests)), self._context, self._rows)
        return self._decoder.forward(step, self._cache)

    def _step(self, requests: list[int], start: int, count: int) -> ForwardInput:
        num_rows = len(requests) * count
        tables = torch.arange(self._blocks) + torch.tensor(requests).unsqueeze(1) * self._blocks
        generator = torch.Generator().manual_seed(start + requests[0])
        return ForwardInput(
            token_ids=torch.randint(100, 40_000, (num_rows,), generator=generator),
            positions=torch.arange(start, start + count).repeat(len(requests)),
            starts=torch.arange(len(requests) + 1) * count,
            block_tables=tables,
            logit_rows=torch.arange(num_rows),
            num_fine=num_rows if start else 0,  # the context is a prompt
            num_sampling_rows=num_rows,
        )


def measure(calls: Calls, repeats: int) -> dict[str, float]:
    """Time every call in turn, many times over; milliseconds, the medians."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + WARM_UP):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if repeat >= WARM_UP:
                samples[name].append((time.perf_counter() - begin) * 1e3)
    return {name: round(statistics.median(times), 2) for name, times in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="sample this model's logits, and time its pass")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=49_152, help="without a model")
    parser.add_argument("--spread", type=float, default=2.5, help="of random logits")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--fast-only", action="store_true", help="leave plain torch out")
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        rows = args.requests * (args.drafts + 1)
        calls: Calls = {}
        if args.model:
            model = Model(args)
            logits = model.verify().float()
            calls["verification pass"] = model.verify
        else:
            logits = torch.randn(rows, args.vocabulary) * args.spread
        calls |= sampling_calls(logits, not args.fast_only)
        calls |= rule_calls(logits, args.requests, args.drafts, not args.fast_only)
        times = measure(calls, args.repeats)
    one_pass = times.get("verification pass")
    print(f"{rows} rows of {logits.shape[1]} logits, {args.threads} threads")
    print(f"{'what':<28}{'ms':>10}{'of a pass':>12}")
    for name, taken in times.items():
        share = f"{taken / one_pass:>12.1%}" if one_pass else ""
        print(f"{name:<28}{taken:>10}{share}")
    described: dict[str, Any] = {"rows": rows, "vocabulary": logits.shape[1], "model": args.model}
    print(json.dumps({"benchmark": "acceptance", **described, "ms": times, **provenance()}))


if __name__ == "__main__":
    main()
