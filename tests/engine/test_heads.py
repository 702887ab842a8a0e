"""EAGLE and Medusa heads beside a live target: drafts are the definition's, text is plain's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference.head_slow import eagle_rows, medusa_rows, random_head
from reference.tiny_engine import Bench
from reference.tiny_heads import eagle_config, medusa_config
from torch.nn import functional

from forerun.draft.eagle import EagleDrafter
from forerun.draft.medusa import MedusaDrafter
from forerun.engine.core import EngineCore
from forerun.heads.config import Head
from forerun.heads.eagle_runner import HeadPlace, load_eagle
from forerun.heads.medusa_runner import load_medusa
from forerun.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)


def successor(ids):
    """What follows each token by habit: see `save_tiny_model`."""
    return torch.where((ids + 1) % 7 == 0, ids - 6, ids + 1)


def knowing_eagle(target, embedding) -> Head:
    """An EAGLE-1 head that hands the token's embedding on: the habit's next token is likeliest."""
    config = eagle_config(target, 1)
    size = target.hidden_size
    head = random_head(config)
    weights = {name: torch.zeros_like(each) for name, each in head.weights.items()}
    weights["fc.weight"][:, :size] = 3 * torch.eye(size)
    weights["layer.mlp_norm.weight"] += 1
    return replace(head, weights=weights)


def knowing_medusa(target, embedding, num_heads: int = 4) -> Head:
    """Medusa heads that know the habit's successors of the token whose state they read."""
    config = medusa_config(
        target, num_heads=num_heads, num_blocks=1, shared_head=False, own_head=True
    )
    head = random_head(config)
    weights = {name: torch.zeros_like(each) for name, each in head.weights.items()}
    ids = torch.arange(target.vocab_size)
    follows = successor(ids).clamp_max(target.vocab_size - 1)
    for index in range(num_heads):
        follows = successor(follows).clamp_max(target.vocab_size - 1)
        weights[f"heads.{index}.out.weight"].index_add_(0, follows, 0.3 * embedding)
    return replace(head, weights=weights)


def make_bench(folder, head, *, trees=True, max_draft=8, choices=None, **options) -> Bench:
    defaults = {"enable_prefix_caching": True}
    bench = Bench(folder, max_draft=max_draft, **(defaults | options))
    setting = bench.machinery.setting
    place = HeadPlace(setting.target, 1, setting.block_size, setting.max_model_len + 64)
    if hasattr(head.config, "generation"):
        drafter = EagleDrafter(
            load_eagle(head, place),
            head.draft_ids,
            num_blocks=setting.num_blocks,
            block_size=setting.block_size,
            most_rows=setting.max_num_batched_tokens,
            device=setting.target.device,
            trees=trees,
        )
    else:
        drafter = MedusaDrafter(
            load_medusa(head, place), head.draft_ids, trees=trees, choices=choices
        )
    bench.drafter = drafter
    bench.core = EngineCore(bench.machinery.runner, bench.machinery.scheduler, drafter)
    bench.core._drafter._row_cost = 0.0
    return bench


def table(bench):
    return bench.decoder.embed(torch.arange(bench.decoder.config.vocab_size)).float()


def heads_for(tiny):
    bench = Bench(tiny.folder)
    target, embedding = bench.decoder.config, table(bench)
    ids = torch.arange(0, target.vocab_size, 2)
    few = {"draft_vocab_size": len(ids)}
    third = {"feature_layers": (2, 0, 1)}
    return {
        "knowing_eagle": knowing_eagle(target, embedding),
        "knowing_medusa": knowing_medusa(target, embedding),
        "eagle1": random_head(eagle_config(target, 1), 1),
        "eagle3": random_head(eagle_config(target, 3, **third), 2),
        "eagle3_few": replace(
            random_head(eagle_config(target, 3, own_head=True, **few, **third), 3), draft_ids=ids
        ),
        "medusa": random_head(medusa_config(target, num_heads=3), 4),
    }


NAMES = ["knowing_eagle", "knowing_medusa", "eagle1", "eagle3", "eagle3_few", "medusa"]
KNOWING = NAMES[:2]


def check(bench, plain):
    assert [each.token_ids for each in bench.seen] == plain
    stats = [each.stats for each in bench.seen]
    assert all(each.drafter_faults == {} for each in stats)
    assert bench.drafter.num_requests == 0
    drafted = sum(each.num_drafted for each in stats)
    assert drafted > 0
    return drafted, sum(each.num_accepted for each in stats), sum(each.num_steps for each in stats)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
@pytest.mark.parametrize("name", NAMES)
def test_text_is_plains(repeating, prompts, name, trees, params):
    plain = [each.token_ids for each in Bench(repeating.folder).generate(prompts, params)]
    head = heads_for(repeating)[name]
    bench = make_bench(repeating.folder, head, trees=trees)
    bench.generate(prompts, params)
    _, accepted, steps = check(bench, plain)
    if name in KNOWING:
        assert accepted > 20, "the habit is known"
        assert steps < 40 * len(prompts)


@pytest.mark.parametrize("name", KNOWING)
def test_a_tree_takes_no_more_steps_than_a_chain(repeating, prompts, name):
    head = heads_for(repeating)[name]
    steps = {}
    for trees in (True, False):
        bench = make_bench(repeating.folder, head, trees=trees, max_draft=16)
        bench.generate(prompts, GREEDY)
        steps[trees] = sum(each.stats.num_steps for each in bench.seen)
    assert steps[True] <= steps[False]


@pytest.mark.parametrize("kernels", ["compiled", "numba", "torch"])
@pytest.mark.parametrize("name", ["knowing_eagle", "eagle3", "knowing_medusa"])
def test_every_way_of_computing(tiny_compiled, name, kernels):
    options = {"kernels": kernels, "block_size": 32, "kv_cache_tokens": 4096}
    prompts = [[5, 6, 7], list(range(20, 90)), [9] * 33]
    plain = [
        each.token_ids for each in Bench(tiny_compiled.folder, **options).generate(prompts, GREEDY)
    ]
    head = heads_for(tiny_compiled)[name]
    bench = make_bench(tiny_compiled.folder, head, max_draft=12, **options)
    bench.generate(prompts, GREEDY)
    check(bench, plain)


@pytest.mark.parametrize("name", ["knowing_eagle", "eagle3", "knowing_medusa"])
def test_preemption_pieces_and_prefixes(repeating, prompts, name):
    head = heads_for(repeating)[name]
    plain = [each.token_ids for each in Bench(repeating.folder).generate(prompts, GREEDY)]
    small = make_bench(
        repeating.folder, head, cache_blocks=26, max_model_len=150, max_num_batched_tokens=24
    )
    small.generate(prompts, GREEDY)
    check(small, plain)
    assert sum(each.stats.num_preemptions for each in small.seen) > 0
    warm = make_bench(repeating.folder, head)
    first = warm.generate([prompts[5]], GREEDY)[0]
    turn = [*prompts[5], *first.token_ids, *prompts[0]]
    (cold,) = Bench(repeating.folder, enable_prefix_caching=False).generate([turn], GREEDY)
    (second,) = warm.generate([turn], GREEDY)
    assert second.stats.num_cached_tokens > 0
    assert second.token_ids == cold.token_ids
    assert second.stats.num_drafted > 0


def states_of(tiny, tokens):
    """Compute the target's hidden states with the slow twin: by layer, and the final one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)
    inner = [model.model.embed_tokens(torch.tensor([tokens]))[0]]
    handles = [
        layer.register_forward_hook(
            lambda _, __, out: (
                inner.append((out[0] if isinstance(out, tuple) else out)[0])
                if not isinstance(out, tuple) or out[0].dim() == 3
                else None
            )
        )
        for layer in model.model.layers
    ]
    with torch.inference_mode():
        final = model.model(torch.tensor([tokens])).last_hidden_state[0]
    for handle in handles:
        handle.remove()
    inner = [each.reshape(len(tokens), -1).detach() for each in inner]
    return inner, final.detach(), model.lm_head.weight.detach(), inner[0]


def slow_eagle_chain(head, tiny, tokens, count):
    """Draft a chain with everything computed anew for every token of it."""
    inner, final, lm_head, _ = states_of(tiny, tokens)
    table = next(iter([inner[0]]))
    from transformers import AutoModelForCausalLM

    embed = AutoModelForCausalLM.from_pretrained(
        tiny.folder, dtype=torch.float32
    ).model.embed_tokens.weight.detach()
    layers = head.config.feature_layers
    known = torch.cat([inner[i] for i in layers], -1) if layers else final
    states = list(known[: len(tokens) - 1])
    text, draft = list(tokens), []
    weight = head.weights.get("head.weight")
    if weight is None:
        weight = lm_head if head.draft_ids is None else lm_head[head.draft_ids]
    for _ in range(count):
        n = len(text) - 1
        out, normed, _ = eagle_rows(
            head,
            embed[text[1:]],
            states,
            torch.arange(n),
            torch.ones(n, n).tril().bool(),
            torch.arange(n) < len(tokens) - 1,
        )
        index = int(functional.linear(normed[-1], weight).argmax())
        token = index if head.draft_ids is None else int(head.draft_ids[index])
        draft.append(token)
        text.append(token)
        states.append(out[-1])
    assert len(table) == len(tokens)
    return draft


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "eagle3_few"])
def test_drafts_are_the_definitions(repeating, prompts, name, monkeypatch):
    """Steps, accepted tokens and batches behind it, a draft is what the definition gives."""
    from forerun.draft import eagle

    monkeypatch.setattr(eagle, "LEAST", 1e-9)  # random heads are sure of nothing
    head = heads_for(repeating)[name]
    bench = make_bench(repeating.folder, head, trees=False, max_draft=4)
    asked = []
    propose = bench.drafter.propose

    def watched(requests):
        proposal = propose(requests)
        for request, row, length in zip(
            requests, proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True
        ):
            asked.append((list(request.tokens), row[:length]))
        return proposal

    bench.drafter.propose = watched
    bench.generate(prompts[:3], replace(GREEDY, max_tokens=12))
    long = [(tokens, draft) for tokens, draft in asked if len(draft) > 1]
    assert len(long) > 10
    for tokens, draft in [*long[:6], *long[-4:]]:
        assert draft == slow_eagle_chain(head, repeating, tokens, len(draft))


def test_medusa_drafts_are_the_definitions(repeating, prompts, monkeypatch):
    from forerun.draft import medusa

    monkeypatch.setattr(medusa, "LEAST", 1e-9)
    head = heads_for(repeating)["medusa"]
    bench = make_bench(repeating.folder, head, trees=False, max_draft=4)
    asked = []
    propose = bench.drafter.propose

    def watched(requests):
        proposal = propose(requests)
        for request, row, length in zip(
            requests, proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True
        ):
            asked.append((list(request.tokens), row[:length]))
        return proposal

    bench.drafter.propose = watched
    bench.generate(prompts[:3], replace(GREEDY, max_tokens=12))
    asked = [(tokens, draft) for tokens, draft in asked if len(draft) == 3]
    assert len(asked) > 20
    for tokens, draft in [*asked[:6], *asked[-4:]]:
        _, final, lm_head, _ = states_of(repeating, tokens)
        rows = medusa_rows(head, final[len(tokens) - 2][None])
        table = [
            head.weights.get(f"heads.{i}.out.weight", head.weights.get("out.weight"))
            for i in range(len(rows))
        ]
        want = [
            int(functional.linear(row[0], lm_head if own is None else own).argmax())
            for row, own in zip(rows, table, strict=True)
        ]
        assert draft == want


def test_a_fixed_tree(repeating, prompts):
    """Published choices: ranks by head. The best path is in it, so the text comes as quickly."""
    head = heads_for(repeating)["knowing_medusa"]
    choices = [[0], [1], [0, 0], [1, 0], [0, 0, 0], [0, 1]]
    plain = [each.token_ids for each in Bench(repeating.folder).generate(prompts, GREEDY)]
    bench = make_bench(repeating.folder, head, choices=choices)
    bench.generate(prompts, GREEDY)
    check(bench, plain)
    longest = max(len(each.stats.offered_by_position) for each in bench.seen)
    assert longest == 3
    drafted = {each.stats.num_drafted / each.stats.num_drafts for each in bench.seen}
    assert max(drafted) <= len(choices)


def test_nan_in_a_head_ends_in_plain_decoding(repeating, prompts, caplog):
    plain = [each.token_ids for each in Bench(repeating.folder).generate(prompts[:3], GREEDY)]
    for name in ("eagle1", "medusa"):
        head = heads_for(repeating)[name]
        broken = {key: torch.full_like(each, torch.nan) for key, each in head.weights.items()}
        bench = make_bench(repeating.folder, replace(head, weights=broken))
        bench.generate(prompts[:3], GREEDY)
        assert [each.token_ids for each in bench.seen] == plain
        assert [each.stats.drafter_faults for each in bench.seen] == [{"propose_failed": 1}] * 3
    assert "NaN" in caplog.text


def test_a_head_of_short_reach_stops_there(repeating, prompts):
    head = heads_for(repeating)["knowing_eagle"]
    layer = replace(head.config.layer, max_positions=30)
    short = replace(head, config=replace(head.config, layer=layer))
    plain = [each.token_ids for each in Bench(repeating.folder).generate(prompts[:1], GREEDY)]
    bench = make_bench(repeating.folder, short)
    lengths = []
    propose = bench.drafter.propose

    def watched(requests):
        proposal = propose(requests)
        lengths.extend(
            (len(r.tokens), int(n)) for r, n in zip(requests, proposal.lengths, strict=True)
        )
        return proposal

    bench.drafter.propose = watched
    bench.generate(prompts[:1], GREEDY)
    check(bench, plain)
    assert any(count for length, count in lengths if length < 28)
    assert not any(count for length, count in lengths if length >= 30)
