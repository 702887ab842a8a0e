"""An EAGLE head that can learn: the maths of `heads.eagle_layered`, over whole rows at once.

A first guess reads the target's states. Each further one reads the head's own estimate in place of
the target's, as drafts do (HASS 2408.15766; EAGLE-3 2503.01840, section 3): it sees the target's
states up to where its draft began, and the head's own behind that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..heads.config import EagleConfig, expected_shapes
from ..model.arch import rope_frequencies
from .examples import Batch
from .naming import put

__all__ = ["EagleNet", "Guess"]


@dataclass(frozen=True, slots=True)
class Guess:
    """One guess for each true look; look a's draft began `depth` looks before it, if it could."""

    depth: int  # 0: from the target's states alone
    read: Tensor  # [N, E], what the vocabulary projection reads
    states: Tensor | None  # [N, E], the estimates of the target's final states; None: no estimates


class EagleNet(nn.Module):
    """Weights by the names of `Head.weights`; those that are the target's own do not learn."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        for name, shape in expected_shapes(config).items():
            put(self, name, nn.Parameter(torch.empty(shape)))
        for name in ("head.weight", "embedding.weight"):
            if name in expected_shapes(config):
                self.get_parameter(name).requires_grad_(False)
        self._frequencies = rope_frequencies(config.layer)

    def forward(self, batch: Batch, num_guesses: int, noise: Tensor | None) -> list[Guess]:
        """Guess every look's label `num_guesses` times, each time from one look further back.

        `noise` [B, T, I] is added to the target's states.
        """
        looks = _Looks(batch)
        features = batch.features if noise is None else batch.features + noise
        read, residual = self._first_inputs(batch.embedded, features)
        positions = torch.arange(read.shape[1])
        keys = self._turn(self._heads("k", read), positions[None])  # [B, G, T, D]
        values = self._heads("v", read)
        embedded = looks.gather(batch.embedded)
        read, residual = looks.gather(read), looks.gather(residual)
        own: list[tuple[Tensor, Tensor]] = []  # keys and values [B, G, A, D] of each further guess
        guesses: list[Guess] = []
        states = residual  # of the guess before; the first has none
        for depth in range(num_guesses):
            if depth:
                previous = functional.pad(states, (0, 0, 1, 0))[:, :-1]
                read, residual = self._own_inputs(embedded, previous)
                own.append((
                    self._turn(self._heads("k", read), looks.positions),
                    self._heads("v", read),
                ))  # fmt: skip
            queries = self._turn(self._heads("q", read), looks.positions)
            mixed = _attend(queries, keys, values, own, looks)
            x = self._layer(residual, mixed)
            normed = self._norm("norm", x) if self.config.output_norm else x
            states = normed if self.config.norm_output else x
            estimates = states[batch.is_look] if self.config.generation == 1 else None
            guesses.append(Guess(depth, normed[batch.is_look], estimates))
        return guesses

    def _first_inputs(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Make what attention reads and what it is added to, of the target's states."""
        if self.config.generation == 1:
            return self._own_inputs(embedded, features)
        return self._own_inputs(embedded, self._linear("fc", self._normed_parts(features)))

    def _own_inputs(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.generation == 1:
            joined = self._linear("fc", torch.cat([embedded, states], dim=-1))
            return (self._norm("input_norm", joined) if self.config.input_norm else joined), joined
        normed = self._norm("hidden_norm", states)
        read = torch.cat([self._norm("embed_norm", embedded), normed], dim=-1)
        return read, normed if self.config.norm_before_residual else states

    def _normed_parts(self, features: Tensor) -> Tensor:
        how = self.config.norm_before_fc
        if how == "none":
            return features
        if how == "one":
            return self._norm("fc_norm", features)
        parts = features.split(self.config.target_hidden_size, dim=-1)
        return torch.cat([self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=-1)

    def _layer(self, residual: Tensor, mixed: Tensor) -> Tensor:
        x = residual + self._linear("layer.o", mixed)
        h = self._norm("layer.mlp_norm", x)
        gated = functional.silu(self._linear("layer.gate", h)) * self._linear("layer.up", h)
        return x + self._linear("layer.down", gated)

    def _heads(self, kind: str, read: Tensor) -> Tensor:  # [B, T, I] -> [B, heads, T, D]
        layer = self.config.layer
        y = self._linear(f"layer.{kind}", read)
        y = y.view(*y.shape[:-1], -1, layer.head_size)
        if layer.qk_norm and kind != "v":
            y = self._norm(f"layer.{kind}_norm", y)
        return y.transpose(1, 2)

    def _turn(self, y: Tensor, positions: Tensor) -> Tensor:
        """Rotate heads [B, heads, T, D] by their positions [B or 1, T]."""
        angles = positions.unsqueeze(-1).float() * self._frequencies  # [B, T, D/2]
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        a, b = y.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        module = self.get_submodule(name)
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None, "every linear layer has one"
        return functional.linear(x, weight, bias)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.get_submodule(name)._parameters["weight"]
        normed: Tensor = functional.rms_norm(x, x.shape[-1:], weight, self.config.layer.norm_eps)
        return normed


class _Looks:
    """Where the looks of a batch lie among its head rows."""

    def __init__(self, batch: Batch) -> None:
        count = batch.is_look.shape[1]
        self.positions = batch.first[:, None] + torch.arange(count)  # [B, A]
        most = batch.features.shape[1] - 1
        self._rows = self.positions.clamp_max(most)  # padding looks at what is there
        self.num_rows = most + 1

    def gather(self, x: Tensor) -> Tensor:  # [B, T, E] -> [B, A, E]
        return x.gather(1, self._rows.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def hidden(self, depth: int) -> Tensor:  # [B, A, T] bool
        """Say which of the target's states a look does not see at a depth."""
        return torch.arange(self.num_rows) > (self.positions - depth).unsqueeze(-1)


def _attend(
    queries: Tensor,  # [B, H, A, D]
    keys: Tensor,  # [B, G, T, D], of the target's states
    values: Tensor,
    own: list[tuple[Tensor, Tensor]],  # [B, G, A, D] each, of the head's own, one pair a depth
    looks: _Looks,
) -> Tensor:  # -> [B, A, H * D]
    """Attend to the target's states before the draft, and to the draft's own states."""
    batch, heads, count, size = queries.shape
    groups, depth = keys.shape[1], len(own)
    grouped = queries.reshape(batch, groups, -1, size)  # [B, G, R * A, D]
    scores = grouped @ keys.transpose(-1, -2)
    shape = (batch, groups, heads // groups, count)
    hidden = looks.hidden(depth)[:, None, None]
    scores = scores.view(*shape, -1).masked_fill(hidden, -torch.inf)
    # What the draft's i-th own state was, for a look that is the draft's `depth`-th.
    shifted = [(_later(k, depth - i), _later(v, depth - i)) for i, (k, v) in enumerate(own, 1)]
    ages = torch.arange(count)
    parts = [scores]
    for i, (key, _) in enumerate(shifted, 1):
        score = (grouped.view(*shape, size) * key.unsqueeze(2)).sum(-1)
        parts.append(score.masked_fill(ages < depth - i, -torch.inf).unsqueeze(-1))
    weights = (torch.cat(parts, dim=-1) * size**-0.5).softmax(-1)
    seen = weights[..., : keys.shape[2]].reshape(batch, groups, -1, keys.shape[2])
    mixed: Tensor = (seen @ values).view(*shape, size)
    for i, (_, value) in enumerate(shifted):
        mixed = mixed + weights[..., keys.shape[2] + i, None] * value.unsqueeze(2)
    result: Tensor = mixed.reshape(batch, heads, count, size).transpose(1, 2)
    return result.reshape(batch, count, -1)


def _later(x: Tensor, by: int) -> Tensor:
    """Move [B, G, A, D] so that look a has what look a - by had."""
    if by == 0:
        return x
    moved: Tensor = functional.pad(x, (0, 0, by, 0))[:, :, : x.shape[2]]
    return moved
