"""What a run says of itself, in lines for people."""

from __future__ import annotations

from .features import FeatureProgress
from .loop import Trained, TrainProgress

__all__ = ["describe_end", "describe_features", "describe_training"]


def describe_features(progress: FeatureProgress) -> str:
    """Say how far the target's states are. The first line announces their size."""
    done = f"{progress.num_positions:,} of {progress.total_positions:,} positions"
    if progress.tokens_per_s is None:
        return f"the target's states: {progress.total_bytes / 1e6:.0f} MB; there: {done}"
    left = progress.total_positions - progress.num_positions
    return (
        f"the target's states: {done}, {progress.tokens_per_s:.0f} tokens/s, "
        f"{_time(left / max(progress.tokens_per_s, 1e-9))} left"
    )


def describe_training(progress: TrainProgress) -> str:
    """Say how far training is, and what was found if the head was judged."""
    line = (
        f"step {progress.step:,}, {progress.share:.0%}, loss {progress.loss:.3f}, "
        f"{progress.tokens_per_s:.0f} tokens/s, {_time(progress.remaining_s)} left"
    )
    judgement = progress.judgement
    if judgement is None:
        return line
    found = judgement.acceptance
    rates = " ".join(f"{each:.3f}" for each in found.greedy)
    return (
        f"{line}; held-out chains that hold: {rates}; tokens of a pass: {found.greedy_length:.2f} "
        f"at temperature 0, {found.sampled_length:.2f} at 1"
    )


def describe_end(done: Trained) -> str:
    """Say how a run ended."""
    best = done.best
    return (
        f"{done.ended}: the best head is that of step {best.step:,}, with "
        f"{best.acceptance.greedy_length:.2f} tokens of a pass at temperature 0 in chains of "
        f"{len(best.acceptance.greedy)}"
    )


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
