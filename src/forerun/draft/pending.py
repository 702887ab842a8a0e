"""Hidden states that a head has been given and has not read yet, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..types import Features, FeatureSpan

__all__ = ["Pending", "select_states"]


@dataclass(slots=True)
class Pending:
    """One request's states of positions [first, end), in the order of positions."""

    tokens: Sequence[int]  # the request's, which grow
    first: int = 0
    parts: list[Tensor] = field(default_factory=list)  # [n, I] each

    @property
    def end(self) -> int:
        return self.first + sum(map(len, self.parts))

    def add(self, first: int, states: Tensor) -> None:
        """Take in positions from `first` on.

        They follow what is known, unless the request was preempted and is computed anew, or began
        with blocks of somebody else's prefix: then what is known is not needed any more.
        """
        if first != self.end:
            self.first, self.parts = first, []
        self.parts.append(states)

    def look(self, count: int) -> Tensor:
        """Show the states of the first `count` positions, [count, I]."""
        if len(self.parts) > 1:
            self.parts = [torch.cat(self.parts)]
        return self.parts[0][:count]

    def drop(self, count: int) -> None:
        """Forget the first `count` positions: they were read."""
        rest = self.look(self.end - self.first)[count:]
        self.first, self.parts = self.first + count, [rest] if len(rest) else []


def select_states(features: Features, span: FeatureSpan, layers: Sequence[int]) -> Tensor:
    """Copy a request's states out of a step's, [n, I]: of some layers side by side, or the final.

    A copy: what a step leaves may be overwritten by the next one.
    """
    states = features.states
    if layers:
        rows = span.rows.to(states.layers[layers[0]].device)
        return torch.cat([states.layers[layer][rows] for layer in layers], dim=-1)
    assert states.final is not None, "asked for in the drafter's abilities"
    return states.final[span.rows.to(states.final.device)]
