"""The training loop: learns, judges, keeps the best, and goes on as if it had never stopped."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from reference.tiny_heads import TARGET, eagle_config
from torch import nn
from train_tools import random_rows

from forerun.errors import ConfigError, ForerunError
from forerun.train.checkpoint import FILE
from forerun.train.eagle_net import Guess
from forerun.train.evaluate import evaluate
from forerun.train.examples import Batch, num_looks, plan_batches
from forerun.train.loop import Limits, TrainingData, TrainProgress, train
from forerun.train.net import make_net
from forerun.train.recipes import Recipe, draw_weights

SIZE = TARGET.hidden_size
CONFIG = dataclasses.replace(eagle_config(TARGET, 1), draft_vocab_size=20, input_norm=True)
IDS = torch.arange(20) * 3
DICE = torch.Generator().manual_seed(3)
TABLE = torch.randn(TARGET.vocab_size, SIZE, generator=DICE)
MIXER = torch.randn(SIZE, SIZE, generator=DICE) / SIZE**0.5


def make_states(rows) -> Batch:
    """Make up a target: its next state follows from the token and the state before."""
    looks = [num_looks(row) for row in rows]
    most = max(len(row.prompt_ids) + n for row, n in zip(rows, looks, strict=True))
    embedded = torch.zeros(len(rows), most, SIZE)
    states = torch.zeros(len(rows), most + 1, SIZE)
    for index, row in enumerate(rows):
        tokens = [*row.prompt_ids, *row.answer_ids][1:]
        embedded[index, : len(tokens)] = TABLE[torch.tensor(tokens) % TARGET.vocab_size]
        for t in range(len(tokens)):
            states[index, t + 1] = torch.tanh((states[index, t] + embedded[index, t]) @ MIXER) * 2
    first = torch.tensor([len(row.prompt_ids) - 1 for row in rows])
    is_look = torch.arange(max(looks)) < torch.tensor(looks)[:, None]
    at = first[:, None] + torch.arange(max(looks))
    each = torch.arange(len(rows))[:, None]
    labels = states[each, (at + 1).clamp_max(most)][is_look]
    logits = labels @ TABLE.T
    return Batch(
        embedded=embedded,
        features=states[:, :most],
        first=first,
        is_look=is_look,
        finals=states[each, at.clamp_max(most)][is_look],
        labels=labels,
        log_sums=logits.logsumexp(-1),
        tops=logits.argmax(-1),
        is_greedy=torch.ones(len(labels), dtype=torch.bool),
    )


DATA = TrainingData(random_rows(30), random_rows(6, 1), make_states, TABLE[IDS], IDS)
RECIPE = Recipe(
    "eagle", batch_tokens=24, num_guesses=2, noise=0.1, feature_weight=0.1, evaluations=4,
    learning_rate=5e-3,
)  # fmt: skip


def new_net():
    torch.manual_seed(0)
    net = make_net(CONFIG)
    draw_weights(net, CONFIG, 0, lambda name: 1.0, DATA.vocabulary)
    return net


def run(folder: Path, report=lambda progress: None, epochs: float = 3.0, recipe=RECIPE):
    identity = {"recipe": dataclasses.asdict(recipe), "epochs": epochs}
    return train(new_net(), DATA, recipe, Limits(epochs=epochs), folder, identity, report)


def test_it_learns_and_judges_as_often_as_asked(tmp_path: Path) -> None:
    done = run(tmp_path, epochs=12)
    assert done.ended == "done"
    assert len(done.history) == 4
    assert done.num_tokens >= 12 * sum(map(num_looks, DATA.rows))
    assert done.history[-1].loss < 0.8 * done.history[0].loss
    assert done.best.acceptance.score == max(each.acceptance.score for each in done.history)


@pytest.mark.parametrize("stop_at", [1, 7, 16])
def test_a_killed_run_ends_as_an_unbroken_one(tmp_path: Path, monkeypatch, stop_at: int) -> None:
    monkeypatch.setattr("forerun.train.loop.CHECKPOINT_S", 0.0)
    monkeypatch.setattr("forerun.train.loop.REPORT_S", 0.0)
    whole = run(tmp_path / "whole")

    def kill(progress: TrainProgress) -> None:
        if progress.step == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", kill)
    steps: list[int] = []
    again = run(tmp_path / "broken", lambda progress: steps.append(progress.step))
    assert steps[0] == stop_at + 1
    for name, weight in whole.weights.items():
        assert torch.equal(weight, again.weights[name]), name
    assert [dataclasses.replace(each) for each in whole.history] == list(again.history)


def test_a_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(ConfigError, match="seed"):
        run(tmp_path, recipe=dataclasses.replace(RECIPE, seed=1))
    (tmp_path / FILE).write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="cannot be read"):
        run(tmp_path)


def test_it_stops_when_nothing_gets_better(tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, learning_rate=1e-20, evaluations=20, patience=2)
    done = run(tmp_path, recipe=recipe, epochs=20)
    assert done.ended == "no better for a while"
    assert len(done.history) < 20


def test_a_head_that_diverges_leaves_the_last_good_one(tmp_path: Path, monkeypatch) -> None:
    recipe = dataclasses.replace(RECIPE, evaluations=30)
    spoil_at = 5

    def spoilt(rows) -> Batch:
        batch = make_states(rows)
        if next(count) >= spoil_at:
            batch.features.fill_(float("nan"))
        return batch

    count = itertools.count()
    data = dataclasses.replace(DATA, batch=spoilt)
    monkeypatch.setattr("forerun.train.loop._Run._eval_batches", lambda self: [DATA.held_out])
    done = train(new_net(), data, recipe, Limits(), tmp_path / "a", {})
    assert done.ended == "diverged"
    assert all(torch.isfinite(weight).all() for weight in done.weights.values())
    spoil_at, count = 0, itertools.count()
    with pytest.raises(ForerunError, match="diverged"):
        train(new_net(), data, recipe, Limits(), tmp_path / "b", {})


def test_hours_and_tokens_end_a_run(tmp_path: Path) -> None:
    few = train(new_net(), DATA, RECIPE, Limits(num_tokens=60), tmp_path / "a", {})
    assert 60 <= few.num_tokens < 60 + RECIPE.batch_tokens
    short = train(new_net(), DATA, RECIPE, Limits(hours=1e-9), tmp_path / "b", {})
    assert short.num_tokens <= RECIPE.batch_tokens


class Oracle(nn.Module):
    """Guesses right, but for chains' third guess."""

    def forward(self, batch: Batch, num_guesses: int, noise) -> list[Guess]:
        right = batch.labels
        return [Guess(i, -right if i == 2 else right, None) for i in range(num_guesses)]


def test_a_head_that_knows_is_judged_so() -> None:
    batches = [make_states(DATA.held_out[:3]), make_states(DATA.held_out[3:])]
    found = evaluate(Oracle(), batches, TABLE, None)
    assert found.greedy == (1.0, 1.0, 0.0, 0.0)
    assert found.sampled[:2] == pytest.approx((1.0, 1.0), abs=1e-4)
    assert found.sampled[2] < 0.2
    assert found.num_drafts == sum(map(num_looks, DATA.held_out))
    assert found.greedy_length == 3.0


def test_batches_hold_every_row_once_and_are_not_too_large() -> None:
    rows = random_rows(60, 2, (2, 20))
    for dice in (None, torch.Generator().manual_seed(1)):
        plan = plan_batches(rows, 40, dice)
        assert sorted(i for batch in plan for i in batch) == list(range(60))
        for batch in plan:
            padded = len(batch) * max(num_looks(rows[i]) for i in batch)
            assert padded <= 40 or len(batch) == 1
