"""An EAGLE head as a row of linear layers, on any device: the plain twin of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..cache.kv_cache import CacheShape, KVCache
from ..model.arch import rope_frequencies
from ..model.linear import Linear, pack_linear
from ..model.ops import AttentionShape, Ops, Rotary
from ..model.torch_ops import TorchOps
from ..types import ForwardInput
from .config import EagleConfig, Head
from .eagle_runner import HeadPlace, head_weight

__all__ = ["LayeredEagle"]


class LayeredEagle:
    """The contract of `EagleRunner`."""

    def __init__(self, head: Head, place: HeadPlace) -> None:
        assert isinstance(head.config, EagleConfig), "another kind of head"
        self.config = head.config
        self._target = place.target
        self._device, self._dtype = place.target.device, place.target.dtype
        weights = {name: each.to(self._device, self._dtype) for name, each in head.weights.items()}
        self._weights = weights
        layer = self.config.layer
        self._fc = self._pack(["fc"])
        self._qkv = self._pack(["layer.q", "layer.k", "layer.v"])
        self._out = self._pack(["layer.o"])
        self._gate_up = self._pack(["layer.gate", "layer.up"])
        self._down = self._pack(["layer.down"])
        self._head = pack_linear(head_weight(head, place.target).to(self._device, self._dtype))
        self._shape = AttentionShape(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            window=layer.sliding_windows[0],
            q_norm=weights.get("layer.q_norm.weight"),
            k_norm=weights.get("layer.k_norm.weight"),
            norm_eps=layer.norm_eps,
        )
        self._ops = self._make_ops(place)

    def cache_shape(self, block_size: int) -> CacheShape:
        """Say what a cache for this head holds."""
        return self.config.layer.cache_shape(block_size, self._dtype)

    @torch.inference_mode()
    def forward(
        self, step: ForwardInput, cache: KVCache, inputs: Tensor, *, of_target: bool
    ) -> tuple[Tensor, Tensor]:
        """Run rows; see `EagleRunner`."""
        config, ops, eps = self.config, self._ops, self.config.layer.norm_eps
        ops.prepare(step, cache)
        embedded = self._embed(step.token_ids)  # [N, E]
        inputs = inputs.to(self._device, self._dtype)
        if config.generation == 1:
            state = self._fc(torch.cat([embedded, inputs], dim=-1))
            read = self._norm("input_norm", state) if config.input_norm else state
            x = state.clone()
        else:
            state = self._fc(self._normed_parts(inputs)) if of_target else inputs
            normed = self._norm("hidden_norm", state)
            read = torch.cat([self._norm("embed_norm", embedded), normed], dim=-1)
            x = normed.clone() if config.norm_before_residual else state.clone()
        mixed = ops.attend(0, self._shape, self._qkv(read))
        h = ops.add_norm(x, self._out(mixed), self._weights["layer.mlp_norm.weight"], eps)
        x += self._down(ops.silu_multiply(self._gate_up(h)))
        rows = x[step.logit_rows.to(self._device)]
        logits = self._head(self._norm("norm", rows) if config.output_norm else rows)
        states = self._norm("norm", x) if config.norm_output else x
        return logits.float(), states

    def _normed_parts(self, inputs: Tensor) -> Tensor:
        how, size = self.config.norm_before_fc, self.config.target_hidden_size
        if how == "none":
            return inputs
        if how == "one":
            return self._norm("fc_norm", inputs)
        parts: Sequence[Tensor] = inputs.split(size, dim=-1)
        return torch.cat([self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=-1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return self._ops.norm(x, self._weights[f"{name}.weight"], self.config.layer.norm_eps)

    def _embed(self, token_ids: Tensor) -> Tensor:
        table = self._weights.get("embedding.weight")
        if table is None:
            return self._target.embed(token_ids)
        return functional.embedding(token_ids.to(self._device), table)

    def _pack(self, names: Sequence[str]) -> Linear:
        """Stack linear layers that share their input into one."""
        weight = torch.cat([self._weights[f"{name}.weight"] for name in names])
        biases = [self._weights.get(f"{name}.bias") for name in names]
        known = [bias for bias in biases if bias is not None]
        return pack_linear(weight, torch.cat(known) if len(known) == len(names) else None)

    def _make_ops(self, place: HeadPlace) -> Ops:
        layer = self.config.layer
        rotary = Rotary.from_frequencies(rope_frequencies(layer), place.max_positions)
        if place.target.kernels == "numba" and layer.head_size % 32 == 0:
            from ..model.numba_ops import NumbaOps  # here: numba takes a second to import

            return NumbaOps(rotary, self._shape, place.num_threads)
        return TorchOps(Rotary(rotary.cos.to(self._device), rotary.sin.to(self._device)))
