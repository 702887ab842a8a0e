"""Passes of EAGLE heads equal their definition: layered, compiled, alone, together and in trees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference.head_slow import eagle_rows, random_head

from forerun.cache.kv_cache import KVCache
from forerun.heads.config import EagleConfig
from forerun.heads.eagle_compiled import CompiledEagle
from forerun.heads.eagle_layered import LayeredEagle
from forerun.heads.eagle_runner import HeadPlace, feature_spec, load_eagle
from forerun.model.decoder import load_decoder
from forerun.model.loader import open_model
from forerun.types import ForwardInput, TreeRows

BLOCK = 32


@pytest.fixture(scope="module", params=["torch", "compiled", "numba"])
def target(request, tiny_compiled):
    files = open_model(tiny_compiled.folder)
    return load_decoder(
        files.config,
        files.weights,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=request.param,
        max_positions=128,
    )


def plain_config(target, generation: int) -> EagleConfig:
    layer = replace(
        target.config, num_layers=1, sliding_windows=(None,), intermediate_size=96, max_positions=96
    )
    return EagleConfig(
        generation=generation,
        layer=layer,
        target_hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=target.config.vocab_size,
        feature_layers=(0, 1, 2) if generation == 3 else (),
        fc_bias=generation == 1,
        input_norm=False,
        output_norm=generation == 3,
        norm_before_residual=False,
        norm_before_fc="none",
        norm_output=False,
        own_embeddings=False,
        own_head=False,
    )


VARIANTS = {
    "eagle1": (1, {}),
    "eagle1_norms": (1, {"input_norm": True, "output_norm": True, "fc_bias": False}),
    "eagle3": (3, {}),
    "eagle3_residual": (3, {"norm_before_residual": True}),
    "eagle3_one_norm": (3, {"norm_before_fc": "one", "norm_output": True}),
    "eagle3_each": (3, {"norm_before_fc": "each", "feature_layers": (2, 0)}),
    "eagle3_own": (3, {"own_embeddings": True, "own_head": True, "draft_vocab_size": 40}),
    "eagle1_few": (1, {"draft_vocab_size": 50}),
}


def make(target, name: str):
    generation, changes = VARIANTS[name]
    config = replace(plain_config(target, generation), **changes)
    dice = torch.Generator().manual_seed(1)
    ids = None
    if config.draft_vocab_size < config.vocab_size:
        ids = torch.randperm(config.vocab_size, generator=dice)[: config.draft_vocab_size]
        ids = ids.sort().values
    head = random_head(config, 2, ids)
    place = HeadPlace(target, num_threads=1, block_size=BLOCK, max_positions=128)
    return head, load_eagle(head, place)


def features(config: EagleConfig, count: int, seed: int):
    width = max(1, len(config.feature_layers)) * config.target_hidden_size
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def embed(head, target, tokens):
    own = head.weights.get("embedding.weight")
    return target.embed(tokens) if own is None else own[tokens]


def expected_logits(head, target, normed):
    weight = head.weights.get("head.weight")
    if weight is None:
        ids = head.draft_ids
        weight = target.head_rows(torch.arange(target.config.vocab_size) if ids is None else ids)
    return normed @ weight.float().T


def test_who_computes(target):
    _, runner = make(target, "eagle3")
    assert type(runner) is (CompiledEagle if target.kernels == "compiled" else LayeredEagle)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_catch_up_and_a_chain_equal_the_definition(target, name):
    """Rows with the target's states in two pieces, then two rows that continue the head's own."""
    head, runner = make(target, name)
    config = head.config
    dice = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 300, (45,), generator=dice)
    given = features(config, 43, 4)
    cache = KVCache(runner.cache_shape(BLOCK), 4, torch.device("cpu"))
    outcomes, states = [], []
    for first, end in ((0, 30), (30, 43)):
        step = ForwardInput.of_one_request(tokens[first:end], first, BLOCK)
        logits, state = runner.forward(step, cache, given[first:end], of_target=True)
        outcomes.append(logits)
        states.append(state)
    for place in (43, 44):
        step = ForwardInput.of_one_request(tokens[place : place + 1], place, BLOCK)
        logits, state = runner.forward(step, cache, states[-1][-1:], of_target=False)
        outcomes.append(logits)
        states.append(state)
    found, found_states = torch.cat(outcomes), torch.cat(states)
    rows = [*given, found_states[42], found_states[43]]
    want_states, normed, _ = eagle_rows(
        head,
        embed(head, target, tokens).float(),
        rows,
        torch.arange(45),
        torch.ones(45, 45).tril().bool(),
        torch.arange(45) < 43,
    )
    torch.testing.assert_close(found_states.float(), want_states, rtol=2e-4, atol=2e-4)
    want = expected_logits(head, target, normed)
    assert found.shape == (45, config.draft_vocab_size)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=2e-3)
    assert want.std() > 0.1


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_a_tree_and_company_equal_the_definition(target, name):
    """Two requests in one pass: one catches up, the other has four nodes of a tree."""
    head, runner = make(target, name)
    config = head.config
    size = config.layer.hidden_size
    dice = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 300, (34,), generator=dice)
    given = features(config, 34, 6)
    cache = KVCache(runner.cache_shape(BLOCK), 8, torch.device("cpu"))
    blocks = torch.tensor([[5, 3, 0], [2, 0, 0]])
    runner.forward(
        replace(ForwardInput.of_one_request(tokens, 0, BLOCK), block_tables=blocks[:1]),
        cache,
        given,
        of_target=True,
    )
    # Nodes behind 34 positions: 1 and 2 follow the root, 3 follows 1, 4 follows 2.
    nodes = torch.randint(0, 300, (4,), generator=dice)
    states = torch.randn(4, size, generator=dice)
    parents, depths = [0, 0, 1, 2], torch.tensor([1, 1, 2, 2])
    positions = 33 + depths
    paths = torch.tensor([[34, 0], [35, 0], [34, 36], [35, 37]])
    tree = TreeRows(torch.arange(34, 38), torch.full((4,), 34), paths)
    step = ForwardInput(
        token_ids=nodes,
        positions=positions,
        starts=torch.tensor([0, 4]),
        block_tables=blocks[:1],
        logit_rows=torch.tensor([3, 0]),
        num_fine=4,
        num_sampling_rows=2,
        tree=tree,
    )
    logits, found = runner.forward(step, cache, states, of_target=False)
    mask = torch.zeros(38, 38, dtype=torch.bool)
    mask[:34, :34] = torch.ones(34, 34).tril().bool()
    for node, parent in enumerate(parents):
        mask[34 + node, :34] = True
        mask[34 + node, 34 + node] = True
        if parent:
            mask[34 + node, 34 + parent - 1] = True
    all_tokens = torch.cat([tokens, nodes])
    want, normed, _ = eagle_rows(
        head,
        embed(head, target, all_tokens).float(),
        [*given, *states],
        torch.cat([torch.arange(34), positions]),
        mask,
        torch.arange(38) < 34,
    )
    torch.testing.assert_close(found.float(), want[34:], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(
        logits, expected_logits(head, target, normed[[37, 34]]), rtol=1e-3, atol=2e-3
    )


def test_which_states_a_head_reads(target):
    assert feature_spec(plain_config(target, 1)).final
    spec = feature_spec(replace(plain_config(target, 3), feature_layers=(2, 0, 1)))
    assert (spec.layers, spec.final) == ((0, 1, 2), False)
