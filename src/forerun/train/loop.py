"""The training loop: steps, a schedule, judgements on held-out rows, and runs that can be killed.

Step n draws its batch and noise from (seed, n) and nothing else, so a run that goes on from a
checkpoint does what an unbroken one would have done. (A limit in hours bends the schedule by the
clock: then no two runs are the same.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ForerunError
from .checkpoint import Judgement, RunState, load_run, save_run
from .evaluate import evaluate
from .examples import Batch, num_looks, plan_batches
from .losses import score, soft_targets
from .net import HeadNet
from .recipes import Recipe
from .rows import Row

__all__ = ["Limits", "TrainProgress", "Trained", "TrainingData", "train"]

LEAST_RATE = 0.05  # of the learning rate, at the end of its fall
CHECKPOINT_S = 120.0
REPORT_S = 5.0


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What is learnt from and judged by."""

    rows: Sequence[Row]
    held_out: Sequence[Row]
    batch: Callable[[Sequence[Row]], Batch]
    vocabulary: Tensor  # [D, E] float32, the target's projection at the draft tokens
    draft_ids: Tensor | None  # [D]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run ends; the first that is reached counts."""

    epochs: float = 4.0
    num_tokens: int | None = None  # looks learnt from
    hours: float | None = None  # of training, those before a break included


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """How far a run is."""

    step: int
    share: float  # of the run, 0..1
    loss: float
    tokens_per_s: float
    remaining_s: float
    judgement: Judgement | None  # made in this very step


@dataclass(frozen=True, slots=True)
class Trained:
    """How a run ended, and the weights that were judged best."""

    weights: Mapping[str, Tensor]
    history: Sequence[Judgement]
    best: Judgement
    num_tokens: int
    elapsed_s: float
    ended: str  # "done", "no better for a while", "diverged"


def train(
    net: HeadNet,
    data: TrainingData,
    recipe: Recipe,
    limits: Limits,
    folder: Path,
    identity: Mapping[str, Any],
    report: Callable[[TrainProgress], None] = lambda progress: None,
) -> Trained:
    """Train a head whose first weights are drawn; go on where a run in `folder` was.

    Raises:
        ConfigError: the run in `folder` has another `identity`.
        ForerunError: the very first steps diverged.
    """
    return _Run(net, data, recipe, limits, folder, identity, report).go()


class _Run:
    """One run, from its start or its checkpoint to its end."""

    def __init__(
        self,
        net: HeadNet,
        data: TrainingData,
        recipe: Recipe,
        limits: Limits,
        folder: Path,
        identity: Mapping[str, Any],
        report: Callable[[TrainProgress], None],
    ) -> None:
        self.net, self.data, self.recipe, self.limits = net, data, recipe, limits
        self.folder, self.identity, self.report = folder, identity, report
        self.learning = {n: p for n, p in net.named_parameters() if p.requires_grad}
        self.optimiser = torch.optim.AdamW(
            self.learning.values(),
            lr=recipe.learning_rate,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
        )
        self.state = RunState()
        self.best: dict[str, Tensor] = {}
        self._recall()
        per_epoch = sum(map(num_looks, data.rows))
        total = limits.epochs * per_epoch
        self.total = min(total, limits.num_tokens or total)
        self.judged = self._eval_batches()
        self.begin_s = time.perf_counter() - self.state.elapsed_s
        self.begin_tokens, self.start_s = self.state.num_tokens, time.perf_counter()
        self.saved_s = self.told_s = self.start_s

    def go(self) -> Trained:
        state = self.state
        while (ended := self._why_end()) is None:
            judged_before = self._num_due()
            loss = self._step()
            if not math.isfinite(loss):
                ended = "diverged"
                break
            state.loss_sum += loss
            state.loss_count += 1
            state.elapsed_s = time.perf_counter() - self.begin_s
            is_due = self._num_due() > judged_before or self._share() >= 1
            judgement = self._judge() if is_due else None
            self._save_if_due(judgement is not None)
            self._tell(loss, judgement)
        if state.best is None:
            if ended == "diverged":
                raise ForerunError(
                    "training diverged before the head was judged once; lower the learning rate "
                    f"(it is {self.recipe.learning_rate})"
                )
            self._judge()
        best = state.best
        assert best is not None, "just judged"
        return Trained(
            self.best, list(state.history), best, state.num_tokens, state.elapsed_s, ended
        )

    def _why_end(self) -> str | None:
        if self._share() >= 1:
            return "done"
        history = self.state.history
        best = self.state.best
        if best is not None and len(history) - history.index(best) > self.recipe.patience:
            return "no better for a while"
        return None

    def _share(self) -> float:
        share = self.state.num_tokens / self.total
        if self.limits.hours is not None:
            share = max(share, self.state.elapsed_s / (self.limits.hours * 3600))
        return min(share, 1.0)

    def _num_due(self) -> int:
        return int(self._share() * self.recipe.evaluations)

    def _step(self) -> float:
        """Learn from one batch; return its loss."""
        state, recipe = self.state, self.recipe
        indexes = self._next_batch()
        batch = self.data.batch([self.data.rows[i] for i in indexes])
        dice = torch.Generator().manual_seed(_mix(recipe.seed, state.step))
        loss = self._loss(batch, dice)
        value = float(loss.detach())
        state.step += 1
        state.num_tokens += len(batch.tops)
        if not math.isfinite(value):
            return value
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.learning.values(), recipe.clip)
        if not torch.isfinite(norm):
            return math.nan
        for group in self.optimiser.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(self._share(), recipe.warmup)
        self.optimiser.step()
        return value

    def _loss(self, batch: Batch, dice: torch.Generator) -> Tensor:
        recipe, vocabulary = self.recipe, self.data.vocabulary
        targets = soft_targets(batch.labels, vocabulary, batch.log_sums)
        noise = None
        if recipe.noise:
            size = batch.finals.square().mean().sqrt() * recipe.noise
            noise = (torch.rand(batch.features.shape, generator=dice) * 2 - 1) * size
        ages, total = batch.ages, torch.zeros(())
        for guess in self.net(batch, recipe.num_guesses, noise):
            is_there = (ages >= guess.depth).float()
            weights = is_there * (recipe.decay**guess.depth / is_there.sum().clamp_min(1))
            total = total + score(guess.read, vocabulary, targets, weights, recipe.loss).loss
            if recipe.feature_weight and guess.states is not None:
                apart = functional.smooth_l1_loss(guess.states, batch.labels, reduction="none")
                total = total + recipe.feature_weight * (apart.mean(-1) * weights).sum()
        return total

    def _next_batch(self) -> list[int]:
        state = self.state
        plan = self._plan(state.epoch)
        if state.batch >= len(plan):
            state.epoch, state.batch = state.epoch + 1, 0
            plan = self._plan(state.epoch)
        state.batch += 1
        return plan[state.batch - 1]

    def _plan(self, epoch: int) -> list[list[int]]:
        dice = torch.Generator().manual_seed(_mix(self.recipe.seed, -1 - epoch))
        return plan_batches(self.data.rows, self.recipe.batch_tokens, dice)

    def _eval_batches(self) -> list[list[Row]]:
        rows, taken, count = self.data.held_out, [], 0
        for row in rows:
            if count >= self.recipe.eval_tokens:
                break
            taken.append(row)
            count += num_looks(row)
        plan = plan_batches(taken, self.recipe.batch_tokens, None)
        return [[taken[i] for i in indexes] for indexes in plan]

    def _judge(self) -> Judgement:
        state = self.state
        acceptance = evaluate(
            self.net,
            (self.data.batch(rows) for rows in self.judged),
            self.data.vocabulary,
            self.data.draft_ids,
        )
        loss = state.loss_sum / max(state.loss_count, 1)
        judgement = Judgement(state.step, state.num_tokens, loss, acceptance)
        state.history.append(judgement)
        state.loss_sum, state.loss_count = 0.0, 0
        if state.best is judgement:
            self.best = {n: p.detach().clone() for n, p in self.net.state_dict().items()}
        return judgement

    def _save_if_due(self, judged: bool) -> None:
        if judged or time.perf_counter() - self.saved_s >= CHECKPOINT_S:
            self.state.elapsed_s = time.perf_counter() - self.begin_s
            save_run(self.folder, self.state, self.identity, self._tensors())
            self.saved_s = time.perf_counter()

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"net.{n}": p.detach() for n, p in self.net.state_dict().items()}
        tensors |= {f"best.{n}": p for n, p in self.best.items()}
        for name, parameter in self.learning.items():
            for key, value in self.optimiser.state[parameter].items():
                tensors[f"adam.{key}.{name}"] = value
        return tensors

    def _recall(self) -> None:
        found = load_run(self.folder, self.identity)
        if found is None:
            return
        self.state, tensors = found
        parts: dict[str, dict[str, Tensor]] = {"net": {}, "best": {}, "adam": {}}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            parts[kind][rest] = tensor
        self.net.load_state_dict(parts["net"])
        self.best = parts["best"]
        for name, tensor in parts["adam"].items():
            key, _, rest = name.partition(".")
            self.optimiser.state[self.learning[rest]][key] = tensor

    def _tell(self, loss: float, judgement: Judgement | None) -> None:
        now = time.perf_counter()
        if judgement is None and now - self.told_s < REPORT_S:
            return
        self.told_s = now
        share, rate = (
            self._share(),
            (self.state.num_tokens - self.begin_tokens) / (now - self.start_s),
        )
        left_s = (self.total - self.state.num_tokens) / max(rate, 1e-9)
        if self.limits.hours is not None:
            left_s = min(left_s, self.limits.hours * 3600 - self.state.elapsed_s)
        self.report(TrainProgress(self.state.step, share, loss, rate, max(left_s, 0.0), judgement))


def _schedule(share: float, warmup: float) -> float:
    """Rise in a line, then fall along a cosine: what part of the learning rate is due."""
    if share < warmup:
        return max(share / warmup, 0.01)
    fall = (share - warmup) / max(1 - warmup, 1e-9)
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * fall))


def _mix(seed: int, number: int) -> int:
    """Make one seed of two numbers."""
    return (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 1) % 2**63
