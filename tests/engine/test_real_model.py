"""SmolLM2-135M in float32: greedy output with n-gram drafts is plain output, token for token."""

from __future__ import annotations

import pytest
from reference.plain import PlainLlama
from reference.prompts import mixed_prompts
from reference.tiny_engine import Bench

from forerun.draft.base import NoDrafter
from forerun.draft.ngram import NgramDrafter
from forerun.engine.core import EngineCore
from forerun.params import SamplingParams
from forerun.registry import forerun_home

pytestmark = pytest.mark.model
FOLDER = forerun_home() / "models" / "smollm2-135m"
SHORT, LONG = (SamplingParams(temperature=0, max_tokens=count) for count in (20, 32))


@pytest.fixture(scope="module")
def smollm2():
    if not (FOLDER / "model.safetensors").exists():
        pytest.skip(f"needs {FOLDER}; run `forerun pull smollm2-135m`")
    # One thread: what else runs beside the tests then costs its share, not a multiple.
    return Bench(
        FOLDER, max_draft=15, kernels="auto", block_size=32, num_threads=1,
        max_model_len=1024, max_num_seqs=8, kv_cache_tokens=8192, max_num_batched_tokens=512,
    )  # fmt: skip


def generate(bench, prompts, params, drafter, max_draft, together):
    """Run prompts through the loaded model with another drafter."""
    bench.machinery.scheduler._max_draft = max_draft
    bench.core = EngineCore(bench.machinery.runner, bench.machinery.scheduler, drafter)
    size = 8 if together else 1
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    return [each for batch in batches for each in bench.generate(batch, params)]


@pytest.fixture(scope="module")
def plain(smollm2):
    """Plain outputs, one request at a time, computed once per prompt."""
    known = {}

    def outputs(prompts, params):
        fresh = [prompt for prompt in prompts if (tuple(prompt), params) not in known]
        for each in generate(smollm2, fresh, params, NoDrafter(), 0, together=False):
            prompt = tuple(each.request.tokens[: each.request.num_prompt])
            known[prompt, params] = each.token_ids
        return [known[tuple(prompt), params] for prompt in prompts]

    return outputs


def encode(bench, count):
    texts = mixed_prompts(count)
    chats = [bench.codec.encode_chat([{"role": "user", "content": text}]) for text in texts[::2]]
    return [bench.codec.encode(text) for text in texts[1::2]] + chats


def assert_equal(prompts, generated, wanted):
    """Compare; where they part, say where, and whether the model was torn between two tokens."""
    faults = []
    for prompt, each, want in zip(prompts, generated, wanted, strict=True):
        if each.token_ids != want:
            pairs = zip(each.token_ids, want, strict=False)
            where = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
            top = PlainLlama(FOLDER).logits([*prompt, *want[:where]])[-1].topk(2)
            gap = float(top.values[0] - top.values[1])
            faults.append(
                f"token {where}: {each.token_ids[where]} for {want[where]}; the two likeliest are "
                f"{top.indices.tolist()}, {gap:.2e} apart: "
                f"{'a numeric tie' if gap < 1e-4 else 'a real fault'}"
            )
    assert not faults, "\n".join(faults)
    drafted = sum(each.stats.num_drafted for each in generated)
    accepted = sum(each.stats.num_accepted for each in generated)
    assert drafted > 0
    assert accepted / drafted > 0.05


@pytest.mark.parametrize("max_draft", [3, 15])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "batch"])
def test_speculation_changes_no_token(smollm2, plain, together, max_draft):
    prompts = encode(smollm2, 12)
    wanted = plain(prompts, SHORT)
    generated = generate(smollm2, prompts, SHORT, NgramDrafter(2, 4), max_draft, together)
    assert_equal(prompts, generated, wanted)


def test_plain_output_is_the_slow_twins(smollm2, plain):
    """One prompt, evaluated from scratch for every token by a second implementation."""
    model = PlainLlama(FOLDER)
    (prompt,) = encode(smollm2, 1)
    (output,) = plain([prompt], SHORT)
    rows = model.logits([*prompt, *output])[len(prompt) - 1 : -1]
    assert rows.argmax(-1).tolist() == output


@pytest.mark.slow
@pytest.mark.parametrize("max_draft", [1, 3, 7, 15])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "batch"])
def test_speculation_changes_no_token_in_100_prompts(smollm2, plain, together, max_draft):
    prompts = encode(smollm2, 100)
    wanted = plain(prompts, LONG)
    generated = generate(smollm2, prompts, LONG, NgramDrafter(2, 4), max_draft, together)
    assert_equal(prompts, generated, wanted)
