"""With exact_bits a token does not depend on drafts, neighbours, pieces or preemption.

The linear layers here are real ones whose result changes with the number of rows in a call, far
more than rounding does: whoever mixes kinds of rows gets other text. The machine's own layers are
tried too, in bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from reference.drafters import Fake
from reference.tiny_engine import Bench

from forerun.errors import ConfigError
from forerun.model import bits, layered
from forerun.model.linear import PlainLinear
from forerun.params import SamplingParams

LENGTH = 24


class Moody(PlainLinear):
    """One kind of result for 1 to 8 rows, another for a full prompt piece, chaos for the rest."""

    def __call__(self, x):
        count = len(x)
        mood = 0 if count <= 8 else 1 if count == bits.PROMPT_PIECE else 2 + count % 5
        exact = torch.cat([torch.nn.functional.linear(row, self.weight) for row in x.split(1)])
        return exact * (1 + 0.01 * mood)


class Guess(Fake):
    """Copies of what stood before: some of them are right."""

    def guess(self, request):
        tokens = list(request.tokens)
        return [tokens[-1 - (i % 7)] for i in range(request.max_draft)]


@pytest.fixture
def moody(monkeypatch, tmp_path):
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))  # what is found here is not the machine's
    for module in (bits, layered):
        monkeypatch.setattr(module, "pack_linear", lambda weight, bias=None: Moody(weight, bias))


def bench(tiny, *, drafter=None, exact="on", **options):
    defaults = {"kernels": "numba", "block_size": 32, "kv_cache_tokens": 4096}
    return Bench(tiny.folder, drafter, exact_bits=exact, **(defaults | options))


def answers(engine, prompts, params, **how):
    return [each.token_ids for each in engine.generate(prompts, params, **how)]


@pytest.fixture
def prompts(tiny_compiled):
    texts = [
        "ab",
        "the quick brown fox " * 12,
        "one two three " * 3,
        "def add(a, b): return a\n" * 25,
    ]
    return [tiny_compiled.codec.encode(text) for text in texts]


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_company_drafts_and_pieces_change_nothing(tiny_compiled, prompts, moody, temperature):
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=LENGTH, ignore_eos=True)
    alone = [answers(bench(tiny_compiled), [prompt], params)[0] for prompt in prompts]
    assert len({len(prompt) > 8 for prompt in prompts}) == 2, "prompts of both kinds"
    together = answers(bench(tiny_compiled), prompts * 3, params)
    assert together == alone * 3
    for max_draft in (1, 7, 15):
        engine = bench(tiny_compiled, drafter=Guess(), max_draft=max_draft)
        assert answers(engine, prompts * 2, params) == alone * 2
        drafted = sum(each.request.counters.num_drafted for each in engine.seen)
        assert drafted > 0
    for budget in (16, 37):
        engine = bench(tiny_compiled, drafter=Guess(), max_num_batched_tokens=budget)
        assert answers(engine, prompts, params) == alone


def test_preemption_computes_every_position_as_its_own_kind(tiny_compiled, prompts, moody):
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    alone = [answers(bench(tiny_compiled), [prompt], params)[0] for prompt in prompts]
    longest = max(map(len, prompts)) + 70
    blocks = -(-longest // 32)
    engine = bench(
        tiny_compiled, drafter=Guess(), kv_cache_tokens=(blocks + 3) * 32, max_model_len=longest
    )
    assert answers(engine, prompts, params) == alone
    assert sum(each.request.counters.num_preemptions for each in engine.seen) > 0


def test_a_cache_hit_changes_nothing(tiny_compiled, prompts, moody):
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    engine = bench(tiny_compiled)
    first = engine.generate([prompts[1]], params)[0]
    # the second turn of a chat: its prompt holds the first answer, computed as output then
    turn = [*prompts[1], *first.token_ids, *prompts[0]]
    warm = engine.generate([turn], params)[0]
    assert warm.stats.num_cached_tokens >= len(prompts[1]) // 32 * 32 > 0, "the prompt is reused"
    assert warm.stats.num_cached_tokens <= len(prompts[1]), "the answer is not"
    cold = bench(tiny_compiled, enable_prefix_caching=False).generate([turn], params)[0]
    assert warm.token_ids == cold.token_ids


def test_without_it_the_moods_are_seen(tiny_compiled, prompts, moody):
    """The control: these layers do change text when nobody minds the rows."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    alone = [answers(bench(tiny_compiled, exact="off"), [p], params)[0] for p in prompts]
    together = answers(bench(tiny_compiled, exact="off"), prompts * 3, params)
    assert together != alone * 3


def test_drafts_fill_a_piece_and_do_not_begin_another(tiny_compiled, prompts, moody):
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    engine = bench(tiny_compiled, drafter=Guess(), max_draft=15)
    for prompt in [prompts[0]] * 3:
        engine.add(prompt, params)
    while engine.core.has_work:
        before = [each.request.counters.num_drafted for each in engine.seen]
        running = sum(each.finish_reason is None for each in engine.seen)
        engine.step()
        after = [each.request.counters.num_drafted for each in engine.seen]
        if engine.num_steps > 1:
            assert running + sum(after) - sum(before) <= 8


def test_the_machines_own_layers_in_bfloat16(tiny_compiled, prompts):
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    engine = bench(tiny_compiled, exact="auto", dtype="bfloat16")
    if not engine.machinery.exact_bits.enabled:
        engine = bench(tiny_compiled, exact="on", dtype="bfloat16")
    alone = [answers(engine, [prompt], params)[0] for prompt in prompts]
    drafting = bench(tiny_compiled, drafter=Guess(), exact="on", dtype="bfloat16", max_draft=15)
    assert answers(drafting, prompts * 4, params) == alone * 4


def test_torch_kernels_cannot_and_say_so(tiny):
    with pytest.raises(ConfigError, match="exact_bits='on' cannot be had here: attention in torch"):
        Bench(tiny.folder, exact_bits="on")
    engine = Bench(tiny.folder)
    assert not engine.machinery.exact_bits.enabled
    assert "attention" in engine.machinery.exact_bits.reason
