"""An EAGLE head as one compiled pass on the CPU, beside a target that is one too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..cache.kv_cache import CacheShape, KVCache
from ..kernels import forward as kernel
from ..kernels.head import matrix_pass
from ..kernels.team import new_counters
from ..kernels.tiles import KEY_BLOCK
from ..kernels.workers import shared_workers
from ..model.arch import rope_frequencies
from ..model.arrays import EVERYTHING, Array, plan_step, view
from ..model.compiled import CompiledDecoder
from ..model.ops import Rotary
from ..model.panels import PANEL, allocate, fill
from ..model.pass_arrays import new_scratch, step_arrays
from ..types import ForwardInput
from .config import EagleConfig, Head
from .eagle_runner import HeadPlace, head_weight

__all__ = ["CompiledEagle"]


class CompiledEagle:
    """The contract of `EagleRunner`. One pass at a time."""

    def __init__(self, head: Head, place: HeadPlace) -> None:
        assert isinstance(head.config, EagleConfig), "another kind of head"
        assert isinstance(place.target, CompiledDecoder), "the head shares its target's table"
        self.config = head.config
        self._dtype = place.target.dtype
        self._stored = np.uint16 if self._dtype == torch.bfloat16 else np.float32
        self._workers = shared_workers(place.num_threads)
        self._target = place.target
        # Norms, and a table of its own: what is small, or read by row.
        self._norms = {
            name.removesuffix(".weight"): each.to(self._dtype)
            for name, each in head.weights.items()
            if each.dim() == 1 or name == "embedding.weight"
        }
        self._fc = self._matrix(head, ["fc"])
        self._weights = self._lay_out(head, place)
        self._compile()

    def cache_shape(self, block_size: int) -> CacheShape:
        """Say what a cache for this head holds."""
        return self.config.layer.cache_shape(block_size, self._dtype)

    def forward(
        self, step: ForwardInput, cache: KVCache, inputs: Tensor, *, of_target: bool
    ) -> tuple[Tensor, Tensor]:
        """Run rows; see `EagleRunner`."""
        config, layer, weights = self.config, self.config.layer, self._weights
        groups = layer.num_kv_heads
        plan = plan_step(step, groups, layer.num_heads // groups, layer.head_size)
        given, x = self._begin(step.token_ids, inputs.to(self._dtype), of_target)
        num_logits = len(step.logit_rows)
        scratch = new_scratch(layer, plan, weights, x, num_logits=num_logits, num_kept=0)
        self._workers.run(
            kernel.forward,
            weights,
            step_arrays(step, plan, ()),
            scratch,
            given,
            view(cache.keys),
            view(cache.values),
            np.float32(layer.norm_eps),
            np.arange(len(x)),
        )
        logits = torch.from_numpy(scratch.logits)[:, : config.draft_vocab_size]
        states = _tensor(x)
        return logits, self._normed("norm", states) if config.norm_output else states

    def _begin(self, token_ids: Tensor, inputs: Tensor, of_target: bool) -> tuple[Array, Array]:
        """Make what the layer begins with: `given` and x, see `kernels.forward`."""
        embedded = self._embed(token_ids)  # [N, E]
        if self.config.generation == 1:
            joined = torch.cat([embedded, inputs], dim=-1).float()
            return joined.numpy(), np.empty(embedded.shape, self._stored)
        state = self._project(inputs) if of_target else inputs
        normed = self._normed("hidden_norm", state)
        paired = torch.cat([self._normed("embed_norm", embedded), normed], dim=-1).float()
        residual = normed if self.config.norm_before_residual else state
        return paired.numpy(), view(residual.clone())

    def _embed(self, token_ids: Tensor) -> Tensor:
        table = self._norms.get("embedding")
        return self._target.embed(token_ids) if table is None else table[token_ids]

    def _project(self, inputs: Tensor) -> Tensor:
        """Run EAGLE-3's fc over the target's states, [N, I] -> [N, E]."""
        how, size = self.config.norm_before_fc, self.config.target_hidden_size
        if how == "one":
            inputs = self._normed("fc_norm", inputs)
        elif how == "each":
            parts = inputs.split(size, dim=-1)
            normed = [self._normed(f"fc_norm.{index}", part) for index, part in enumerate(parts)]
            inputs = torch.cat(normed, dim=-1)
        out = np.empty((len(inputs), self.config.layer.hidden_size), self._stored)
        panels, bias = self._fc
        no_scales = np.zeros((1, 0), np.float32)
        self._workers.run(
            matrix_pass, inputs.float().numpy(), panels, bias, no_scales, out, new_counters(1)
        )
        return _tensor(out)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.layer.norm_eps)
        return (wide * scale).to(self._dtype) * self._norms[name]

    def _lay_out(self, head: Head, place: HeadPlace) -> kernel.Weights:
        """Put the layer and both vocabularies where a model's would be."""
        config, layer = self.config, self.config.layer
        assert isinstance(place.target, CompiledDecoder)
        table, table_scales = place.target.embedding_panels  # nobody reads them here
        if config.own_head or head.draft_ids is not None or place.target.head_panels is None:
            head_panels, head_bias = self._panels(head_weight(head, place.target), None)
        else:
            head_panels, head_bias = place.target.head_panels  # one table, not two
        qkv, qkv_bias = self._matrix(head, ["layer.q", "layer.k", "layer.v"])
        out, out_bias = self._matrix(head, ["layer.o"])
        gate_up, gate_up_bias = self._matrix(head, ["layer.gate", "layer.up"])
        down, down_bias = self._matrix(head, ["layer.down"])
        rotary = Rotary.from_frequencies(rope_frequencies(layer), place.max_positions)
        no_scales = np.zeros((1, 0), np.float32)
        fc, fc_bias = self._fc
        if config.generation == 3:  # whose fc comes before a norm
            fc, fc_bias = fc[:, :0].copy(), fc_bias[:, :0].copy()
        empty = torch.zeros(layer.hidden_size, dtype=self._dtype)
        ends = [self._norms.get(name, empty) for name in ("input_norm", "norm")]
        return kernel.Weights(
            embedding=table,
            embedding_scales=table_scales,
            qkv=qkv,
            qkv_bias=qkv_bias,
            qkv_scales=no_scales,
            out=out,
            out_bias=out_bias,
            out_scales=no_scales,
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            gate_up_scales=no_scales,
            down=down,
            down_bias=down_bias,
            down_scales=no_scales,
            head=head_panels,
            head_bias=head_bias,
            head_scales=no_scales,
            input_norms=view(torch.stack(ends)),
            skips_norm=np.array([not config.input_norm, not config.output_norm]),
            fc=fc,
            fc_bias=fc_bias,
            fc_scales=no_scales,
            mlp_norms=self._norm("layer.mlp_norm"),
            q_norms=self._norm("layer.q_norm"),
            k_norms=self._norm("layer.k_norm"),
            windows=np.array([layer.sliding_windows[0] or EVERYTHING], np.int64),
            cos=rotary.cos.numpy(),
            sin=rotary.sin.numpy(),
        )

    def _matrix(self, head: Head, names: Sequence[str]) -> tuple[Array, Array]:
        """Stack matrices that share their input, and their biases."""
        parts = [head.weights[f"{name}.weight"] for name in names]
        biases = [head.weights.get(f"{name}.bias") for name in names]
        known = [bias.float() for bias in biases if bias is not None]
        return self._panels(torch.cat(parts), torch.cat(known) if known else None)

    def _norm(self, name: str) -> Array:
        """Lay out the norm of the layer, [1, n], or [1, 0] where it has none."""
        return view(self._norms.get(name, torch.empty(0, dtype=self._dtype))[None])

    def _panels(self, weight: Tensor, bias: Tensor | None) -> tuple[Array, Array]:
        """Put a weight into panels [1, ...], its bias beside it [1, outputs]."""
        form = "bfloat16" if self._dtype == torch.bfloat16 or _fits_bf16(weight) else "float32"
        panels = allocate(1, *weight.shape, form=form)
        fill(panels[0], weight, np.empty(0, np.float32))
        biases = np.zeros((1, panels.shape[1] * PANEL), np.float32)
        if bias is not None:
            biases[0, : len(bias)] = bias.numpy()
        return panels, biases

    def _compile(self) -> None:
        """Run one token each way, so that nobody's first draft waits for compilation."""
        step = ForwardInput.of_one_request(torch.zeros(1, dtype=torch.int64), 0, KEY_BLOCK)
        cache = KVCache(self.cache_shape(KEY_BLOCK), 1, torch.device("cpu"))
        config = self.config
        width = max(1, len(config.feature_layers)) * config.target_hidden_size
        self.forward(step, cache, torch.zeros(1, width, dtype=self._dtype), of_target=True)


def _tensor(array: Array) -> Tensor:
    """See stored numbers as a tensor: bits as bfloat16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def _fits_bf16(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 or torch.equal(weight.bfloat16().to(weight.dtype), weight)
