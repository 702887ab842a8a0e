"""The CUDA path against the CPU's: eager and captured passes, one upload a step, the engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference.drafters import RightThenWrong
from reference.tiny_engine import Bench
from reference.tiny_models import make_decoder, random_prompt, save_tiny_model

from forerun import Engine, SamplingParams
from forerun.cache.kv_cache import KVCache
from forerun.draft.ngram import NgramDrafter
from forerun.model.decoder import load_decoder
from forerun.model.graphs import CudaCapture, GraphedDecoder
from forerun.model.loader import open_model
from forerun.types import ForwardInput

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCK, TABLE = 32, 24
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.12, torch.float16: 0.015}  # thrice the CPU's
GREEDY = SamplingParams(temperature=0, max_tokens=48)
FAMILIES = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "mistral": ("mistral", {"sliding_window": 40}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def files(request, tmp_path_factory):
    name, options = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_model(folder, name, num_hidden_layers=2, **options)
    return open_model(folder)


def on_cuda(files, dtype):
    return load_decoder(files.config, files.weights, device=torch.device("cuda"), dtype=dtype)


def steps():
    """Prompts, then drafts of 8 requests that are refused, then a prompt beside single tokens."""
    random = np.random.default_rng(0)
    lengths = [0] * 8

    def step(counts: dict[int, int]) -> ForwardInput:
        owners = list(counts)
        positions = [lengths[r] + i for r, count in counts.items() for i in range(count)]
        starts = np.cumsum([0, *counts.values()])
        for request, count in counts.items():
            lengths[request] += count
        total = int(starts[-1])
        return ForwardInput(
            token_ids=torch.tensor(random_prompt(total, seed=int(random.integers(1e9)))),
            positions=torch.tensor(positions),
            starts=torch.from_numpy(starts),
            block_tables=torch.tensor([[r * TABLE + i for i in range(TABLE)] for r in owners]),
            logit_rows=torch.arange(total),
            num_fine=total,
            num_sampling_rows=total,
        )

    yield step({0: 400, 1: 3, 2: 65, 3: 1})
    yield step({4: 5, 5: 31, 6: 32, 7: 33, 0: 1})
    for _ in range(12):
        counts = {r: int(random.integers(1, 6)) for r in range(8) if random.random() < 0.8}
        yield step(counts or {0: 1})
        for request, count in counts.items():
            lengths[request] -= int(random.integers(0, count))
    yield step({0: 1, 1: 200, 2: 1, 5: 4})


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_captured_and_eager_passes_agree_with_the_cpu(files, dtype):
    cpu = make_decoder(files.config, files.weights, "torch")  # float32
    cuda = on_cuda(files, dtype)
    num_blocks = 8 * TABLE
    caches = [
        KVCache(decoder.cache_shape(BLOCK), num_blocks + 1, decoder.device)
        for decoder in (cpu, cuda, cuda)
    ]
    graphed = GraphedDecoder(cuda, caches[2], num_blocks, CudaCapture(cuda.device))
    worst = []
    for step in steps():
        exact = cpu.forward(step, caches[0])
        eager, captured = cuda.forward(step, caches[1]).cpu(), graphed.forward(step).cpu()
        worst.append(float((eager - exact).abs().max()))
        assert float((eager - exact).square().mean().sqrt()) < TOLERANCE[dtype]
        assert float((captured - exact).square().mean().sqrt()) < TOLERANCE[dtype]
        if dtype == torch.float32:
            torch.testing.assert_close(captured, eager, rtol=1e-3, atol=1e-3)
    assert graphed.shapes, "nothing was captured"
    if dtype == torch.float32:
        for one, other in [(caches[1].keys, caches[2].keys), (caches[1].values, caches[2].values)]:
            torch.testing.assert_close(
                one[:, :num_blocks], other[:, :num_blocks], rtol=1e-3, atol=1e-3
            )
    assert max(worst) > 0


def test_a_step_from_the_host_never_waits(files):
    decoder = on_cuda(files, torch.bfloat16)
    num_blocks = 8 * TABLE
    cache = KVCache(decoder.cache_shape(BLOCK), num_blocks + 1, decoder.device)
    graphed = GraphedDecoder(decoder, cache, num_blocks, CudaCapture(decoder.device))
    for step in steps():
        graphed.forward(step)  # captures what is new
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps():
            graphed.forward(step)
            decoder.forward(step, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("drafter", ["none", "oracle", "ngram"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_speculation_changes_nothing(repeating, prompts, drafter, temperature):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=48)
    chosen = {
        "none": lambda: None,
        "oracle": lambda: RightThenWrong(repeating.answers(prompts, params), repeating.vocab_size),
        "ngram": lambda: NgramDrafter(1, 4),
    }[drafter]()
    bench = Bench(repeating.folder, chosen, device="cuda", block_size=32)
    bench.generate(prompts, params)
    for each, prompt in zip(bench.seen, prompts, strict=True):
        assert each.error is None
        assert tuple(each.token_ids) == repeating.plain(prompt, params).token_ids
    assert bench.machinery.runner._passes._graphed.shapes


def test_the_engine_answers_on_cuda_as_on_the_cpu(repeating, prompts):
    found = []
    for device, drafter in [("cpu", "none"), ("cuda", "none"), ("cuda", "ngram")]:
        with Engine.from_pretrained(
            str(repeating.folder), device=device, dtype="float32", drafter=drafter
        ) as engine:
            found.append([result.token_ids for result in engine.generate(prompts, GREEDY)])
    assert found[0] == found[1] == found[2]
