"""Draft trees through the live engine: whatever branches, tokens and bits stay those of plain."""

from __future__ import annotations

import random

import pytest
import torch
from reference.drafters import Fake, Oracle, Raising
from reference.tiny_engine import Bench

from forerun.params import SamplingParams
from forerun.types import Features, FeatureSpec, Proposal

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


class TreeOracle(Oracle):
    """Hide the right path among wrong ones: somewhere in a random tree, for a random length."""

    def __init__(self, answers, vocab_size: int, seed: int = 0) -> None:
        super().__init__(answers, vocab_size)
        self.seed = seed
        self.num_trees = 0

    def propose(self, requests):
        trees = [self.tree(request) for request in requests]
        self.num_trees += sum(self.branches(parents) for _, parents in trees)
        return Proposal.from_trees(trees)

    @staticmethod
    def branches(parents) -> bool:
        return list(parents) != list(range(len(parents)))

    def tree(self, request):
        dice = random.Random(f"{self.seed} {len(request.tokens)} {request.request_id}")
        future = self.future(request)
        size = dice.randint(0, request.max_draft)
        right = future[: dice.randint(0, size)]
        tokens, parents = [], []
        spine = 0  # the deepest right node so far
        taken = {}
        while len(tokens) < size:
            left = size - len(tokens)
            depth = len([t for t in taken.values() if t])
            if depth < len(right) and (left <= len(right) - depth or dice.random() < 0.4):
                token, parent = right[depth], spine
            else:
                token, parent = dice.randrange(self.vocab_size), dice.randint(0, len(tokens))
            is_right = parent == spine and depth < len(right) and token == right[depth]
            if (parent, token) in taken:
                continue
            tokens.append(token)
            parents.append(parent)
            taken[parent, token] = is_right
            if is_right:
                spine = len(tokens)
        return tokens, parents


def answers_of(tiny, prompts, params, **options):
    return [each.token_ids for each in Bench(tiny.folder, **options).generate(prompts, params)]


def assert_trees(bench, drafter):
    assert drafter.num_trees > 10
    stats = [each.stats for each in bench.seen]
    assert all(each.drafter_faults == {} for each in stats)
    accepted, drafted = sum(s.num_accepted for s in stats), sum(s.num_drafted for s in stats)
    assert 0 < accepted < drafted
    assert all(sum(s.accepted_by_position) == s.num_accepted for s in stats)
    assert all(sum(s.offered_by_position) <= s.num_drafted for s in stats)


@pytest.mark.parametrize("together", [True, False], ids=["batch", "alone"])
@pytest.mark.parametrize("max_draft", [3, 8, 16])
def test_greedy_text_is_plains(tiny, prompts, max_draft, together):
    answers = tiny.answers(prompts, GREEDY)
    for seed in range(3):
        drafter = TreeOracle(answers, tiny.vocab_size, seed)
        bench = Bench(tiny.folder, drafter, max_draft=max_draft, max_num_batched_tokens=512)
        for part in [prompts] if together else [[prompt] for prompt in prompts]:
            bench.generate(part, GREEDY)
        assert [[*p, *e.token_ids] for p, e in zip(prompts, bench.seen, strict=True)] == answers
        assert_trees(bench, drafter)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["compiled", "numba", "torch"])
def test_a_tree_leaves_bits_alone(tiny_compiled, kernels, dtype):
    """Contexts on both sides of blocks and segments; in compiled passes even bits are equal."""
    dice = random.Random(3)
    lengths = (1, 29, 31, 33, 250, 255, 256, 290)
    prompts = [[dice.randrange(300) for _ in range(length)] for length in lengths]
    options = {"kernels": kernels, "dtype": dtype, "block_size": 32, "kv_cache_tokens": 8192}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=None)
    plain = answers_of(tiny_compiled, prompts, params, **options)
    answers = [[*prompt, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    exact = kernels == "compiled"
    rows = {}

    def recorded(bench, store):
        forward = bench.machinery.runner.forward

        def run(step, wanted=None):
            logits, states = forward(step, wanted)
            owners = torch.repeat_interleave(torch.arange(len(step.starts) - 1), step.starts.diff())
            for row, index in enumerate(step.logit_rows.tolist()):
                key = (len(step.starts), int(owners[index]), int(step.positions[index]))
                store.setdefault((*key, int(step.token_ids[index])), []).append(logits[row].clone())
            return logits, states

        bench.machinery.runner.forward = run

    drafter = TreeOracle(answers, tiny_compiled.vocab_size)
    bench = Bench(
        tiny_compiled.folder, drafter, max_draft=16, max_num_batched_tokens=512, **options
    )
    plain_bench = Bench(tiny_compiled.folder, **options)
    if exact:
        recorded(plain_bench, rows)
        found = {}
        recorded(bench, found)
    for index, prompt in enumerate(prompts):
        plain_bench.generate([prompt], params)
        bench.generate([prompt], params)
        if not exact:
            continue
        # Rows on the right path are plain decoding's, bit for bit, wherever they lay in a tree.
        same = [key for key in rows if key in found]
        assert len(same) > 20
        for key in same:
            assert any(torch.equal(rows[key][0], each) for each in found[key]), (index, key)
        rows.clear()
        found.clear()
    assert_trees(bench, drafter)
    if exact or dtype == "float32":
        assert [each.token_ids for each in bench.seen] == plain


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_seeded_text_is_plains(tiny, prompts, temperature):
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=40, ignore_eos=True)
    plain = answers_of(tiny, prompts, params)
    answers = [[*prompt, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    drafter = TreeOracle(answers, tiny.vocab_size)
    bench = Bench(tiny.folder, drafter, max_draft=12, max_num_batched_tokens=512)
    assert [each.token_ids for each in bench.generate(prompts, params)] == plain
    assert_trees(bench, drafter)


def test_what_looks_at_histories_gets_one_path(tiny, prompts):
    """Penalties, log-probabilities: the tree is cut to its first path, the text stays."""
    params = [
        SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    ]
    few = prompts[:3]
    plain = answers_of(tiny, few, params)
    answers = [[*prompt, *tokens] for prompt, tokens in zip(few, plain, strict=True)]
    drafter = TreeOracle(answers, tiny.vocab_size)
    bench = Bench(tiny.folder, drafter, max_draft=8)
    shapes = []
    forward = bench.machinery.runner.forward

    def watched(step, wanted=None):
        shapes.append(step.tree)
        return forward(step, wanted)

    bench.machinery.runner.forward = watched
    found = bench.generate(few, params)
    assert [each.token_ids for each in found] == plain
    assert any(shape is not None for shape in shapes)
    for each in found[:2]:
        stats = each.stats
        assert sum(stats.offered_by_position) == stats.num_drafted, "a path's tokens, no more"


def test_blocks_are_reused_after_trees(tiny_compiled):
    """What a tree's path left in the cache is what a later request finds under the prefix."""
    options = {"block_size": 32, "kv_cache_tokens": 4096, "kernels": "compiled"}
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    prompt = [5, 6, 7, 8]
    (plain,) = answers_of(tiny_compiled, [prompt], params, **options)
    answer = [*prompt, *plain]
    drafter = TreeOracle([answer], tiny_compiled.vocab_size)
    bench = Bench(tiny_compiled.folder, drafter, max_draft=10, **options)
    bench.generate([prompt], params)
    assert_trees(bench, drafter)
    turn = [*answer, 9, 10, 11]
    short = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (cold,) = answers_of(
        tiny_compiled, [turn], short, **(options | {"enable_prefix_caching": False})
    )
    drafter.answers.append([*turn, *cold])
    (warm,) = bench.generate([turn], short)
    assert warm.stats.num_cached_tokens >= 64
    assert warm.token_ids == cold


def test_preemption_and_little_cache(tiny, prompts):
    answers = tiny.answers(prompts, GREEDY)
    drafter = TreeOracle(answers, tiny.vocab_size)
    bench = Bench(tiny.folder, drafter, max_draft=6, cache_blocks=26, max_model_len=150)
    bench.generate(prompts, GREEDY)
    assert [[*p, *e.token_ids] for p, e in zip(prompts, bench.seen, strict=True)] == answers
    assert sum(each.stats.num_preemptions for each in bench.seen) > 0
    assert_trees(bench, drafter)


@pytest.mark.parametrize(
    ("tokens", "parents", "reason"),
    [
        ([5, 6], [0, 3], "bad_tree"),
        ([5, 6], [0, 2], "bad_tree"),
        ([5, 6], [-1, 0], "bad_tree"),
        ([5, 5], [0, 0], "bad_tree"),
    ],
)
def test_what_is_no_tree_is_refused(tiny, prompts, tokens, parents, reason, caplog):
    class Wrong(Fake):
        def propose(self, requests):
            return Proposal.from_trees([(tokens, parents) for _ in requests])

    bench = Bench(tiny.folder, Wrong())
    bench.generate(prompts[:1], GREEDY)
    assert bench.seen[0].stats.drafter_faults == {reason: 1}
    assert bench.seen[0].token_ids == answers_of(tiny, prompts[:1], GREEDY)[0]
    assert reason in caplog.text


class Reader(TreeOracle):
    """Check that the hidden states it is given are those of the positions they are said to be."""

    def __init__(self, answers, vocab_size: int, expected) -> None:
        super().__init__(answers, vocab_size)
        self.expected, self.seen = expected, {}

    @property
    def abilities(self):
        from forerun.draft.base import Abilities

        return Abilities(features=FeatureSpec(layers=(0, 1, 2), final=True))

    def observe(self, outcomes, features: Features | None) -> None:
        if features is None:
            return
        for span in features.spans:
            for offset, row in enumerate(span.rows.tolist()):
                states = features.states
                assert states.final is not None
                found = torch.cat([states.layers[n][row] for n in (0, 1, 2)] + [states.final[row]])
                self.seen.setdefault(span.request_id, {})[span.first + offset] = found.float()


@pytest.mark.parametrize("kernels", ["compiled", "numba", "torch"])
def test_hidden_states_are_those_of_the_committed_positions(tiny_compiled, kernels):
    """Of prompts in pieces, of accepted paths of trees, and of nothing else."""
    dice = random.Random(4)
    prompts = [[dice.randrange(300) for _ in range(length)] for length in (3, 40, 90)]
    options = {"kernels": kernels, "block_size": 32, "kv_cache_tokens": 4096}
    plain = answers_of(tiny_compiled, prompts, GREEDY, **options)
    answers = [[*prompt, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    reader = Reader(answers, tiny_compiled.vocab_size, None)
    bench = Bench(tiny_compiled.folder, reader, max_draft=8, max_num_batched_tokens=48, **options)
    bench.generate(prompts, GREEDY)
    assert [each.token_ids for each in bench.seen] == plain
    assert_trees(bench, reader)
    for request_id, answer in enumerate(answers):
        seen = reader.seen[request_id]
        # The step that ends a request says nothing of its last positions.
        assert sorted(seen) == list(range(len(seen)))
        assert len(seen) > len(answer) - 12
        expected = slow_states(tiny_compiled, answer)
        for position, found in seen.items():
            torch.testing.assert_close(found, expected[position], rtol=1e-2, atol=2e-3)


def slow_states(tiny, tokens):
    """Recompute hidden states with transformers: embeddings, after layers 1 and 2, final."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)
    inner = []
    handles = [
        layer.register_forward_hook(
            lambda _, __, out: inner.append((out[0] if isinstance(out, tuple) else out).detach())
        )
        for layer in model.model.layers
    ]
    with torch.inference_mode():
        result = model.model(torch.tensor([tokens]))
        first = model.model.embed_tokens(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    parts = [first, *(each.view_as(first) for each in inner), result.last_hidden_state]
    return torch.cat(parts, dim=-1)[0]


def test_a_drafter_that_fails_on_hidden_states_fails_alone(tiny, prompts):
    answers = tiny.answers(prompts[:3], GREEDY)
    reader = Reader(answers, tiny.vocab_size, None)

    class Broken(Raising):
        @property
        def abilities(self):
            return self.inner.abilities

        def observe(self, outcomes, features):
            spans = () if features is None else features.spans
            self._trip("observe", [each.request_id for each in spans])
            self.inner.observe(outcomes, features)

    bench = Bench(tiny.folder, Broken(reader, "observe", 1))
    bench.generate(prompts[:3], GREEDY)
    faults = [each.stats.drafter_faults for each in bench.seen]
    assert faults == [{}, {"observe_failed": 1}, {}]
    assert [[*p, *e.token_ids] for p, e in zip(prompts, bench.seen, strict=False)] == answers
