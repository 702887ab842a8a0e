"""An EAGLE head as one compiled pass on the CPU, beside a target that is one too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..cache.kv_cache import CacheShape, KVCache
from ..kernels import forward as target_kernel
from ..kernels import head as kernel
from ..kernels.team import new_counters
from ..kernels.tiles import KEY_BLOCK
from ..kernels.workers import shared_workers
from ..model.arch import rope_frequencies
from ..model.arrays import EVERYTHING, Array, plan_step, view
from ..model.compiled import CompiledDecoder
from ..model.ops import Rotary
from ..model.panels import PANEL, allocate, fill
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
        joins = config.generation == 1
        has_fc = of_target or joins
        size, groups = layer.hidden_size, layer.num_kv_heads
        plan = plan_step(step, groups, layer.num_heads // groups, layer.head_size)
        num_rows, num_logits = len(plan.positions), len(step.logit_rows)
        given = view(inputs.to(self._dtype).contiguous())
        x = np.empty((num_rows, size), self._stored)
        none = np.empty((0, 0), np.int16)
        scratch = kernel.EagleScratch(
            inputs=given,
            embedded=np.empty((num_rows, size), self._stored),
            wide=np.empty((num_rows, _inputs_of(weights.fc) if has_fc else 0), np.float32),
            states=np.empty((num_rows, size), self._stored) if has_fc else given,
            paired=np.empty((num_rows, _inputs_of(weights.qkv)), np.float32),
            x=x,
            h=np.empty((max(num_rows, num_logits), size), np.float32),
            qkv=np.empty((num_rows, (layer.num_heads + 2 * groups) * layer.head_size), x.dtype),
            queries=plan.queries,
            partial=plan.partial,
            tops=plan.tops,
            totals=plan.totals,
            mixed=np.empty((num_rows, layer.num_heads * layer.head_size), np.float32),
            active=np.empty((num_rows, layer.intermediate_size), np.float32),
            logits=np.empty((num_logits, weights.head.shape[1] * PANEL), np.float32),
            whole_h=none,
            whole_mixed=none,
            whole_active=none,
            row_scales=np.empty(max(num_rows, num_logits), np.float32),
            counters=new_counters(kernel.NUM_EAGLE_PHASES),
        )
        part = {"none": 0, "one": given.shape[1], "each": config.target_hidden_size}
        self._workers.run(
            kernel.eagle_pass,
            weights,
            target_kernel.Step(
                tokens=step.token_ids.numpy(),
                positions=plan.positions,
                branch_at=plan.branch_at,
                paths=plan.paths,
                slots=plan.slots,
                tables=plan.tables,
                units=plan.units,
                token_units=plan.token_units,
                logit_rows=step.logit_rows.numpy(),
                kept_layers=np.empty(0, np.int64),
            ),
            scratch,
            view(cache.keys[0]),
            view(cache.values[0]),
            np.float32(layer.norm_eps),
            np.arange(num_rows),
            layer.sliding_windows[0] or EVERYTHING,
            joins,
            has_fc,
            part[config.norm_before_fc] if has_fc else 0,
            config.norm_before_residual,
        )
        logits = torch.from_numpy(scratch.logits)[:, : config.draft_vocab_size]
        states = torch.from_numpy(x)
        if self._dtype == torch.bfloat16:
            states = states.view(torch.bfloat16)
        return logits, self._norm_output(states) if config.norm_output else states

    def _norm_output(self, states: Tensor) -> Tensor:
        wide = states.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.layer.norm_eps)
        return (wide * scale).to(self._dtype) * self._last_norm

    def _lay_out(self, head: Head, place: HeadPlace) -> kernel.EagleWeights:
        config, layer, given = self.config, self.config.layer, head.weights
        assert isinstance(place.target, CompiledDecoder)

        def matrix(names: Sequence[str]) -> tuple[Array, Array]:
            parts = [given[f"{name}.weight"] for name in names]
            biases = [given.get(f"{name}.bias") for name in names]
            known = [bias.float() for bias in biases if bias is not None]
            return self._panels(torch.cat(parts), torch.cat(known) if known else None)

        def norm(*names: str) -> Array:
            found = [given[f"{name}.weight"] for name in names if f"{name}.weight" in given]
            joined = torch.cat(found) if found else torch.empty(0)
            return view(joined.to(self._dtype)[None].contiguous())

        table, table_scales = place.target.embedding_panels
        if config.own_embeddings:
            table, _ = self._panels(given["embedding.weight"], None)
            table_scales = np.zeros((1, 0), np.float32)
        if config.own_head or head.draft_ids is not None or place.target.head_panels is None:
            head_panels, head_bias = self._panels(head_weight(head, place.target), None)
        else:
            head_panels, head_bias = place.target.head_panels  # one table, not two
        fc, fc_bias = matrix(["fc"])
        qkv, qkv_bias = matrix(["layer.q", "layer.k", "layer.v"])
        out, out_bias = matrix(["layer.o"])
        gate_up, gate_up_bias = matrix(["layer.gate", "layer.up"])
        down, down_bias = matrix(["layer.down"])
        rotary = Rotary.from_frequencies(rope_frequencies(layer), place.max_positions)
        num_parts = len(config.feature_layers)
        self._last_norm = given.get("norm.weight", torch.empty(0)).to(self._dtype)
        return kernel.EagleWeights(
            embedding=table,
            embedding_scales=table_scales,
            fc=fc,
            fc_bias=fc_bias,
            fc_norm=norm("fc_norm", *(f"fc_norm.{index}" for index in range(num_parts))),
            embed_norm=norm("embed_norm"),
            state_norm=norm("hidden_norm", "input_norm"),
            qkv=qkv,
            qkv_bias=qkv_bias,
            out=out,
            out_bias=out_bias,
            mlp_norms=norm("layer.mlp_norm"),
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=down,
            down_bias=down_bias,
            last_norms=norm("norm"),
            head=head_panels,
            head_bias=head_bias,
            q_norms=norm("layer.q_norm"),
            k_norms=norm("layer.k_norm"),
            no_scales=np.zeros((1, 0), np.float32),
            cos=rotary.cos.numpy(),
            sin=rotary.sin.numpy(),
        )

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


def _inputs_of(panels: Array) -> int:
    pairs = 2 if panels.dtype == np.uint32 else 1
    return int(panels.shape[2]) * pairs


def _fits_bf16(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 or torch.equal(weight.bfloat16().to(weight.dtype), weight)
