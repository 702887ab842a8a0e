"""SmolLM2-135M on real text: greedy in float32, token for token what transformers generates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from forerun.engine.engine import Engine
from forerun.errors import ModelNotFound
from forerun.params import SamplingParams
from forerun.registry import resolve_model

NAME = "smollm2-135m"
pytestmark = pytest.mark.model

RAW = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "Water boils at 100 degrees Celsius because",
    "import numpy as np\n\n# Compute the mean of each row\n",
    "Q: Why is the sky blue?\nA:",
    "Les enfants jouent dans le jardin et",
    "| country | capital |\n|---|---|\n| Spain | Madrid |\n| Italy |",
    "😀 means happy, 😢 means",
]
CHAT = [
    "What is gravity?",
    "Write a haiku about autumn.",
    "List three prime numbers.",
    "Translate 'good morning' into Spanish.",
    "Write a Python function that reverses a string.",
    "Summarise in one sentence: Bees collect nectar, pollinate flowers and make honey.",
    "Who wrote Hamlet?",
    "What is 17 + 25? Explain your steps.",
]
PROMPTS: list[Any] = [*RAW, *([{"role": "user", "content": text}] for text in CHAT)]
FEW = [0, 2, 12, 16]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    try:
        resolve_model(NAME)
    except ModelNotFound:
        pytest.skip(f"{NAME} is not pulled")
    options = {"max_model_len": 1024, "kv_cache_tokens": 8192, "num_threads": 1}
    with Engine.from_pretrained(NAME, drafter="none", dtype="float32", **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference() -> Any:
    try:
        folder = resolve_model(NAME)
    except ModelNotFound:
        pytest.skip(f"{NAME} is not pulled")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def generate(reference: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Continue greedily with transformers; one end token, if any, comes last."""
    output = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=reference.generation_config.eos_token_id,
            pad_token_id=0,
        ),
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def describe(reference: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> str:
    """Say where two answers part, and how near the two best logits were there."""
    common = 0
    while common < min(len(ours), len(theirs)) and ours[common] == theirs[common]:
        common += 1
    logits = reference(torch.tensor([prompt + theirs[:common]])).logits[0, -1]
    best = logits.topk(2)
    gap = float(best.values[0] - best.values[1])
    return (
        f"position {common}: ours {ours[common : common + 1]}, transformers' "
        f"{theirs[common : common + 1]}; its best two {best.indices.tolist()} are {gap:.3g} apart"
    )


@torch.inference_mode()
def follow(reference: Any, prompt: list[int], ours: list[int], max_tokens: int) -> list[int]:
    """What `generate` would say, if ours are right: transformers' choice after each of our tokens.

    One pass in place of one per token. Equal to ours throughout exactly if `generate` is.
    """
    logits = reference(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 :]
    choices: list[int] = logits.argmax(-1).tolist()
    ends = reference.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    length = next((i + 1 for i, token in enumerate(choices) if token in ends), max_tokens)
    return choices[:length]


def test_greedy_text_equals_that_of_transformers(engine, reference):
    prompts = [PROMPTS[index] for index in FEW]
    results = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64))
    for result in results:
        tokens, ours = list(result.prompt_token_ids), list(result.token_ids)
        theirs = follow(reference, tokens, ours, max_tokens=64)
        assert ours == theirs, describe(reference, tokens, ours, theirs)


@pytest.mark.slow
def test_greedy_text_of_all_prompts_is_generated_by_transformers_too(engine, reference):
    results = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=128))
    problems = []
    for result in results:
        tokens, ours = list(result.prompt_token_ids), list(result.token_ids)
        theirs = generate(reference, tokens, max_tokens=128)
        if ours != theirs:
            problems.append(describe(reference, tokens, ours, theirs))
    assert not problems, "\n".join(problems)


@torch.inference_mode()
def test_logits_of_a_real_prompt_equal_those_of_transformers(engine, reference):
    prompt = engine.encode(PROMPTS[16])
    theirs = reference(torch.tensor([prompt])).logits[0, -1]
    (result,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
    assert result.token_ids == (int(theirs.argmax()),)
