"""Losses are what they are defined to be, value and gradient."""

from __future__ import annotations

import pytest
import torch

from forerun.train.losses import score, soft_targets

N, E, D, V = 7, 6, 9, 14


def setting(seed: int = 0):
    dice = torch.Generator().manual_seed(seed)
    table = torch.randn(V, E, generator=dice, dtype=torch.float64)
    ids = torch.randperm(V, generator=dice)[:D].sort().values
    labels = torch.randn(N, E, generator=dice, dtype=torch.float64)
    read = torch.randn(N, E, generator=dice, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(N, generator=dice, dtype=torch.float64)
    return table, ids, labels, read, weights


def test_soft_targets_are_the_whole_softmax_read_off_at_draft_tokens() -> None:
    table, ids, labels, _, _ = setting()
    logits = labels @ table.T
    found = soft_targets(labels, table[ids], logits.logsumexp(-1))
    torch.testing.assert_close(found, logits.softmax(-1)[:, ids])
    assert bool((found.sum(-1) < 1).all())


@pytest.mark.parametrize("loss", ["cross-entropy", "acceptance"])
def test_value_and_gradient_are_those_of_the_definition(loss: str) -> None:
    table, ids, labels, read, weights = setting()
    targets = soft_targets(labels, table[ids], (labels @ table.T).logsumexp(-1))
    found = score(read, table[ids], targets, weights, loss)
    found.loss.backward()
    made = read.grad.clone()
    read.grad = None

    log_q = (read @ table[ids].T).log_softmax(-1)
    overlaps = torch.minimum(log_q.exp(), targets).sum(-1)
    each = -(targets * log_q).sum(-1) if loss == "cross-entropy" else -overlaps.log()
    (each * weights).sum().backward()
    torch.testing.assert_close(found.loss, (each * weights).sum())
    torch.testing.assert_close(made, read.grad)
    torch.testing.assert_close(found.overlaps, overlaps)
    assert found.tops.tolist() == log_q.argmax(-1).tolist()


def test_a_loss_scaled_later_scales_its_gradient() -> None:
    table, ids, labels, read, weights = setting()
    targets = soft_targets(labels, table[ids], (labels @ table.T).logsumexp(-1))
    score(read, table[ids], targets, weights, "cross-entropy").loss.backward()
    once = read.grad.clone()
    read.grad = None
    (3 * score(read, table[ids], targets, weights, "cross-entropy").loss).backward()
    torch.testing.assert_close(read.grad, 3 * once)


def test_large_logits_stay_finite() -> None:
    table, ids, labels, read, weights = setting()
    targets = soft_targets(labels, table[ids], (labels @ table.T).logsumexp(-1))
    found = score((read * 1e3).detach(), table[ids], targets, weights, "cross-entropy")
    assert torch.isfinite(found.loss)
