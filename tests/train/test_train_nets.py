"""Heads that learn compute what heads are defined to compute, drafts' own states included."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from reference.head_slow import eagle_rows, medusa_rows, random_head
from reference.tiny_heads import TARGET, eagle_config

from forerun.heads.config import EagleConfig, MedusaConfig, expected_shapes
from forerun.train.eagle_net import EagleNet
from forerun.train.examples import Batch
from forerun.train.medusa_net import MedusaNet

PROMPTS, LOOKS = (3, 5, 2), (6, 4, 7)


def make_batch(inputs: int, size: int, seed: int = 0) -> Batch:
    dice = torch.Generator().manual_seed(seed)
    most = max(p - 1 + n for p, n in zip(PROMPTS, LOOKS, strict=True))
    total = sum(LOOKS)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice)

    return Batch(
        embedded=noise(3, most, size),
        features=noise(3, most, inputs),
        first=torch.tensor(PROMPTS) - 1,
        is_look=torch.arange(max(LOOKS)) < torch.tensor(LOOKS)[:, None],
        finals=noise(total, size),
        labels=noise(total, size),
        log_sums=noise(total),
        tops=torch.zeros(total, dtype=torch.int64),
        is_greedy=torch.ones(total, dtype=torch.bool),
    )


def draft_by_definition(head, batch: Batch, row: int, root: int, depth: int) -> torch.Tensor:
    """Draft step by step behind head row `root` of a row; return what the projection reads."""
    states = list(batch.features[row, : root + 1])
    for step in range(depth + 1):
        count = root + 1 + step
        first = torch.arange(count) <= root
        mask = torch.ones(count, count).tril().bool()
        own, normed, _ = eagle_rows(
            head, batch.embedded[row, :count], states, torch.arange(count), mask, first
        )
        states.append(own[-1])
    return normed[-1]


CONFIGS = {
    "eagle1": lambda: eagle_config(TARGET, 1),
    "eagle1-normed": lambda: dataclasses.replace(
        eagle_config(TARGET, 1), input_norm=True, output_norm=True
    ),
    "eagle3": lambda: eagle_config(TARGET, 3),
    "eagle3-residual": lambda: dataclasses.replace(
        eagle_config(TARGET, 3), norm_before_residual=True, norm_before_fc="each"
    ),
    "eagle3-qwen3": lambda: eagle_config(
        TARGET, 3, layer_options={"qk_norm": True, "qkv_bias": True, "o_bias": True}
    ),
    "eagle3.1": lambda: dataclasses.replace(
        eagle_config(TARGET, 3), norm_output=True, norm_before_fc="one"
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_guess_is_what_a_draft_would_be(kind: str) -> None:
    config: EagleConfig = CONFIGS[kind]()
    head = random_head(config)
    net = EagleNet(config)
    net.load_state_dict(dict(head.weights))
    size = config.layer.hidden_size
    batch = make_batch(size * max(len(config.feature_layers), 1), size)
    with torch.no_grad():
        guesses = net(batch, 4, None)
    rows = [(row, a) for row, count in enumerate(LOOKS) for a in range(count)]
    assert [guess.depth for guess in guesses] == [0, 1, 2, 3]
    num_checked = 0
    for guess in guesses:
        assert guess.read.shape == (sum(LOOKS), size)
        for (row, a), read in zip(rows, guess.read, strict=True):
            if a < guess.depth:
                assert torch.isfinite(read).all()
                continue
            root = PROMPTS[row] - 1 + a - guess.depth
            expected = draft_by_definition(head, batch, row, root, guess.depth)
            torch.testing.assert_close(read, expected, rtol=1e-4, atol=1e-4)
            num_checked += 1
    assert num_checked == 17 + 14 + 11 + 8


@pytest.mark.parametrize("kind", CONFIGS)
def test_its_state_has_the_names_of_a_head(kind: str) -> None:
    config: EagleConfig = CONFIGS[kind]()
    net = EagleNet(config)
    assert {name: tuple(each.shape) for name, each in net.state_dict().items()} == expected_shapes(
        config
    )


def test_padding_teaches_nothing() -> None:
    config = eagle_config(TARGET, 1)
    net = EagleNet(config)
    net.load_state_dict(dict(random_head(config).weights))
    size = config.layer.hidden_size
    batch = make_batch(size, size)
    with torch.no_grad():
        before = net(batch, 3, None)
        for row, (prompt, count) in enumerate(zip(PROMPTS, LOOKS, strict=True)):
            batch.features[row, prompt - 1 + count :] = 100.0
            batch.embedded[row, prompt - 1 + count :] = -100.0
        after = net(batch, 3, None)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one.read, other.read)


def test_medusa_heads_guess_each_label_from_further_back() -> None:
    config = MedusaConfig(
        num_heads=3, num_blocks=2, hidden_size=32, vocab_size=50, draft_vocab_size=50,
        shared_head=True, own_head=False, block_bias=True,
    )  # fmt: skip
    head = random_head(config)
    net = MedusaNet(config)
    net.load_state_dict(dict(head.weights))
    batch = make_batch(32, 32)
    with torch.no_grad():
        guesses = net(batch, 3, None)
    by_head = medusa_rows(head, batch.finals)
    ages = batch.ages.tolist()
    for guess in guesses:
        for index, age in enumerate(ages):
            if age >= guess.depth:
                expected = by_head[guess.depth][index - guess.depth]
                torch.testing.assert_close(guess.read[index], expected)
