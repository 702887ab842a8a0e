"""What a look of a draft head costs, in passes of its target over one row.

Heads of random weights beside the real target, since cost does not depend on what weights say: one
more look of an EAGLE head over 1, 4 and 16 rows (a chain, a beam, a batch), its states read from
the target, all of Medusa's heads at once. Each look is timed with what the drafter does to it:
laying out, the pass, the likeliest tokens. Passes of the target are interleaved with them, so
every look finds the caches as it does in a step.

    python benchmarks/head_cost.py --model smollm2-135m --draft-vocab 8192
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from forerun.cache.kv_cache import KVCache
from forerun.draft.guesses import DraftWords, likeliest
from forerun.draft.rows import RequestRows, lay_out
from forerun.engine.engine import Engine
from forerun.heads.config import EagleConfig, Head, HeadConfig, MedusaConfig, expected_shapes
from forerun.heads.eagle_runner import HeadPlace, load_eagle
from forerun.heads.medusa_runner import load_medusa
from forerun.measure.provenance import provenance
from forerun.model.arch import ModelConfig
from forerun.types import ForwardInput

CONTEXT = 256
BEAM = 4


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--draft-vocab", type=int, default=8192)
    options.add_argument("--repeats", type=int, default=40)
    options.add_argument("--dtype", default="auto")
    given = options.parse_args()
    engine = Engine.from_pretrained(given.model, drafter="none", dtype=given.dtype)
    try:
        rows = measure(engine, given.draft_vocab, given.repeats)
    finally:
        machinery = engine.machinery
        engine.close()
    print(f"{'':28}{'ms':>8}{'of a pass':>11}{'quartiles':>18}")
    for name, row in rows.items():
        print(
            f"{name:28}{row['ms']:8.2f}{row['ratio']:11.3f}{row['low']:10.3f} - {row['high']:.3f}"
        )
    facts = {"model": given.model, "draft_vocab": given.draft_vocab, "kernels": machinery.kernels}
    print(json.dumps({"benchmark": "head_cost", **facts, "rows": rows, **provenance()}))


def measure(engine: Engine, draft_vocab: int, repeats: int) -> dict[str, dict[str, float]]:
    """Time every look in turn, a pass of the target before each: medians, and ratios by pair."""
    setting = engine.machinery.setting
    target, block = setting.target, setting.block_size
    cache = KVCache(target.cache_shape(block), -(-(CONTEXT + 16) // block), target.device)
    prompt = torch.randint(0, target.config.vocab_size, (CONTEXT,))
    target.forward(ForwardInput.of_one_request(prompt, 0, block, last_only=True), cache)
    step = ForwardInput.of_one_request(prompt[:1], CONTEXT, block)
    calls = looks(engine, draft_vocab)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, call in calls.items():
            begin_s = time.perf_counter()
            target.forward(step, cache)
            middle_s = time.perf_counter()
            call()
            times[name].append((middle_s - begin_s, time.perf_counter() - middle_s))
    result = {}
    for name, pairs in times.items():
        ratios = sorted(look / own for own, look in pairs[2:])
        quarter = len(ratios) // 4
        result[name] = {
            "ms": 1e3 * statistics.median(look for _, look in pairs[2:]),
            "pass_ms": 1e3 * statistics.median(own for own, _ in pairs[2:]),
            "ratio": statistics.median(ratios),
            "low": ratios[quarter],
            "high": ratios[-1 - quarter],
        }
    return result


def looks(engine: Engine, draft_vocab: int) -> dict[str, Callable[[], object]]:
    """Make heads and what is to be timed of them."""
    setting = engine.machinery.setting
    target = setting.target
    shape = target.config
    place = HeadPlace(target, setting.num_threads, setting.block_size, CONTEXT + 64)
    ids = torch.arange(draft_vocab)
    blocks = list(range(CONTEXT // setting.block_size + 2))
    calls: dict[str, Callable[[], object]] = {}
    for generation in (1, 3):
        head = random_head(eagle(shape, generation, draft_vocab), ids)
        runner = load_eagle(head, place)
        words = DraftWords(ids)
        states = KVCache(runner.cache_shape(setting.block_size), 40 * len(blocks), target.device)
        width = max(1, len(head.config.feature_layers)) * shape.hidden_size
        kinds = {"reads 1 state": (width, True, 1), "looks at 1 row": (shape.hidden_size, False, 1)}
        kinds |= {
            f"looks at {count} rows": (shape.hidden_size, False, count) for count in (BEAM, 16)
        }
        if generation == 1:
            kinds["reads 1 state"] = (shape.hidden_size, True, 1)
        for kind, (inputs, of_target, count) in kinds.items():
            given = torch.randn(1, inputs).to(target.dtype)

            def look(
                given=given, of_target=of_target, count=count, runner=runner, states=states,
                words=words,
            ):  # fmt: skip
                # Rows of `count` requests with a context each.
                pieces = [
                    RequestRows([7], [CONTEXT], [b + n * len(blocks) for b in blocks], [0])
                    for n in range(count)
                ]
                inputs = torch.cat([given] * count)
                logits, _ = runner.forward(lay_out(pieces), states, inputs, of_target=of_target)
                return likeliest(logits, BEAM, words)

            calls[f"EAGLE-{generation} {kind}"] = look
    config = MedusaConfig(
        num_heads=4,
        num_blocks=1,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        draft_vocab_size=draft_vocab,
        shared_head=True,
        own_head=False,
        block_bias=True,
    )
    medusa = load_medusa(random_head(config, ids), place)
    x = torch.randn(1, shape.hidden_size)
    words = DraftWords(ids)
    calls["Medusa, 4 heads at once"] = lambda: likeliest(medusa.forward(x)[:, 0], 8, words)
    return calls


def eagle(shape: ModelConfig, generation: int, draft_vocab: int) -> EagleConfig:
    third = generation == 3
    count = shape.num_layers
    return EagleConfig(
        generation=generation,
        layer=replace(shape, num_layers=1, sliding_windows=(None,), tie_embeddings=False),
        target_hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        draft_vocab_size=draft_vocab,
        feature_layers=(2, count // 2, count - 3) if third else (),
        fc_bias=not third,
        input_norm=False,
        output_norm=third,
        norm_before_residual=False,
        norm_before_fc="none",
        norm_output=False,
        own_embeddings=False,
        own_head=third,
    )


def random_head(config: HeadConfig, ids: torch.Tensor) -> Head:
    weights = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape) * shape[-1] ** -0.5
        for name, shape in expected_shapes(config).items()
    }
    return Head(config, {k: v.bfloat16() for k, v in weights.items()}, ids, None, None, ())


if __name__ == "__main__":
    main()
