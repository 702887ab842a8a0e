"""The decoder as one compiled pass on the CPU: no library call and no Python between its layers.

Every sum is taken in one order whatever else is computed beside it, so rows keep their bits in any
company without padding or pieces.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..cache.kv_cache import CacheShape, KVCache
from ..kernels import forward as kernel
from ..kernels.team import new_counters
from ..kernels.workers import shared_workers
from ..types import ForwardInput
from .arch import ModelConfig, expected_shapes, rope_frequencies
from .arrays import EVERYTHING, Array, plan_step, view
from .ops import Rotary
from .panels import PANEL, all_fit_bf16, allocate, fill
from .reader import WeightReader
from .weights import WeightSource

__all__ = ["CompiledDecoder"]


class CompiledDecoder:
    """The target's weights in panels and its forward pass. One pass at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        max_positions: int,
        num_threads: int,
    ) -> None:
        """Read the weights.

        Raises:
            ModelFileError: a weight is missing, has another shape, or holds NaN or infinity.
        """
        self.config = config
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.kernels = "compiled"
        self._workers = shared_workers(num_threads)
        self._weights = _read_weights(config, weights, dtype, max_positions)
        self._stored = np.uint16 if dtype == torch.bfloat16 else np.float32

    @property
    def max_fine_rows(self) -> int | None:
        """Nothing is ever cut to keep bits."""
        return None

    def cache_shape(self, block_size: int) -> CacheShape:
        """Say what a cache for this model holds."""
        return CacheShape(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_size=self.config.head_size,
            block_size=block_size,
            dtype=self.dtype,
        )

    def forward(self, step: ForwardInput, cache: KVCache) -> Tensor:
        """Run a step's tokens and store their keys and values: logits [M, V] float32.

        Only rows that `step.logit_rows` names pay for the vocabulary projection.
        """
        assert cache.shape == self.cache_shape(cache.shape.block_size), "a cache of another model"
        config, weights = self.config, self._weights
        size, inner = config.hidden_size, config.intermediate_size
        groups, share = config.num_kv_heads, config.num_heads // config.num_kv_heads
        plan = plan_step(step, groups, share, config.head_size)
        num_rows, num_logits = len(plan.positions), len(step.logit_rows)
        wide = (config.num_heads + 2 * groups) * config.head_size
        arguments = (
            weights,
            kernel.Step(
                tokens=step.token_ids.numpy(),
                positions=plan.positions,
                slots=plan.slots,
                tables=plan.tables,
                units=plan.units,
                token_units=plan.token_units,
                logit_rows=step.logit_rows.numpy(),
            ),
            kernel.Scratch(
                x=np.empty((num_rows, size), self._stored),
                h=np.empty((max(num_rows, num_logits), size), np.float32),
                qkv=np.empty((num_rows, wide), self._stored),
                queries=plan.queries,
                partial=plan.partial,
                tops=plan.tops,
                totals=plan.totals,
                mixed=np.empty((num_rows, config.num_heads * config.head_size), np.float32),
                active=np.empty((num_rows, inner), np.float32),
                logits=np.empty((num_logits, weights.head.shape[1] * PANEL), np.float32),
                counters=new_counters(kernel.num_phases(config.num_layers)),
            ),
            view(cache.keys),
            view(cache.values),
            np.float32(config.norm_eps),
            np.arange(num_rows),
        )
        self._workers.run(kernel.forward, *arguments)
        return torch.from_numpy(arguments[2].logits)[:, : config.vocab_size]

    def run_linear_layers(self, num_rows: int) -> None:
        """Run the linear layers alone, on noise: the floor that a pass is measured against."""
        config = self.config
        widths = (config.hidden_size, config.num_heads * config.head_size, config.intermediate_size)
        narrow, mixed, inner = (
            np.random.default_rng(0).standard_normal((num_rows, width)).astype(np.float32)
            for width in widths
        )
        weights = self._weights
        panels = max(part.shape[1] for part in (weights.qkv, weights.gate_up, weights.out))
        arguments = (
            weights,
            narrow,
            mixed,
            inner,
            np.empty((num_rows, panels * PANEL), self._stored),
            np.empty((num_rows, weights.head.shape[1] * PANEL), np.float32),
            new_counters(kernel.num_phases(config.num_layers)),
        )
        self._workers.run(kernel.linear_layers, *arguments)


def _read_weights(
    config: ModelConfig, source: WeightSource, dtype: torch.dtype, max_positions: int
) -> kernel.Weights:
    size, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    wide, narrow = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    matrices = [name for name, shape in expected_shapes(config).items() if len(shape) == 2]
    paired = dtype == torch.bfloat16 or all_fit_bf16(source, matrices)
    reader = WeightReader(source, torch.device("cpu"), dtype)

    def matrix(outputs: int, inputs: int, count: int = layers) -> tuple[Array, Array]:
        panels = allocate(count, outputs, inputs, paired=paired)
        return panels, np.zeros((count, panels.shape[1] * PANEL), np.float32)

    def norms(count: int, width: int) -> Tensor:
        return torch.zeros(count, width, dtype=dtype)

    qkv, qkv_bias = matrix(wide + 2 * narrow, size)
    out, out_bias = matrix(size, wide)
    gate_up, gate_up_bias = matrix(2 * inner, size)
    down, down_bias = matrix(size, inner)
    embedding, head_bias = matrix(config.vocab_size, size, 1)
    input_norms, mlp_norms = norms(layers + 1, size), norms(layers, size)
    head_width = config.head_size if config.qk_norm else 0
    q_norms, k_norms = norms(layers, head_width), norms(layers, head_width)

    def put(place: Array, bias: Array, parts: dict[str, int], inputs: int, biased: bool) -> None:
        weight, offset = reader.stack(parts, inputs, bias=biased)
        fill(place, weight)
        if offset is not None:
            bias[: len(offset)] = offset.float().numpy()

    for index in range(layers):
        base = f"model.layers.{index}"
        attention, mlp = f"{base}.self_attn", f"{base}.mlp"
        parts = {f"{attention}.q_proj": wide}
        parts |= {f"{attention}.{name}_proj": narrow for name in ("k", "v")}
        put(qkv[index], qkv_bias[index], parts, size, config.qkv_bias)
        put(out[index], out_bias[index], {f"{attention}.o_proj": size}, wide, config.o_bias)
        parts = {f"{mlp}.{name}_proj": inner for name in ("gate", "up")}
        put(gate_up[index], gate_up_bias[index], parts, size, False)
        put(down[index], down_bias[index], {f"{mlp}.down_proj": size}, inner, False)
        input_norms[index] = reader.read(f"{base}.input_layernorm.weight", size)
        mlp_norms[index] = reader.read(f"{base}.post_attention_layernorm.weight", size)
        if config.qk_norm:
            q_norms[index] = reader.read(f"{attention}.q_norm.weight", head_width)
            k_norms[index] = reader.read(f"{attention}.k_norm.weight", head_width)
    input_norms[layers] = reader.read("model.norm.weight", size)
    fill(embedding[0], reader.read("model.embed_tokens.weight", config.vocab_size, size))
    head = embedding
    if not config.tie_embeddings:
        head, head_bias = matrix(config.vocab_size, size, 1)
        fill(head[0], reader.read("lm_head.weight", config.vocab_size, size))
    rotary = Rotary.from_frequencies(rope_frequencies(config), max_positions)
    windows = [window or EVERYTHING for window in config.sliding_windows]
    return kernel.Weights(
        embedding=embedding,
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=out,
        out_bias=out_bias,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
        head=head,
        head_bias=head_bias,
        input_norms=view(input_norms),
        mlp_norms=view(mlp_norms),
        q_norms=view(q_norms),
        k_norms=view(k_norms),
        windows=np.array(windows, np.int64),
        cos=rotary.cos.numpy(),
        sin=rotary.sin.numpy(),
    )
