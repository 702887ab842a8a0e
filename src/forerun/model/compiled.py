"""The decoder as one compiled pass on the CPU: no library call and no Python between its layers.

Every sum is taken in one order whatever else is computed beside it, so rows keep their bits in any
company without padding or pieces.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cache.kv_cache import CacheShape, KVCache
from ..kernels import forward as kernel
from ..kernels.team import new_counters
from ..kernels.tiles import KEY_BLOCK
from ..kernels.workers import shared_workers
from ..types import FeatureSpec, ForwardInput, HiddenStates
from .arch import ModelConfig, expected_shapes, rope_frequencies
from .arrays import EVERYTHING, Array, plan_step, view
from .ops import Rotary
from .panels import PANEL, all_fit_bf16, allocate, fill, read_rows
from .pass_arrays import new_scratch, step_arrays
from .reader import WeightReader
from .weights import WeightSource

__all__ = ["CompiledDecoder"]

logger = logging.getLogger(__name__)

TOLD_S = 3.0  # compiling takes longer, reading what was compiled before does not


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
        quantize: str = "none",
    ) -> None:
        """Read the weights; with quantize="int8" round them to eight bits.

        Raises:
            ModelFileError: a weight is missing, has another shape, or holds NaN or infinity.
        """
        self.config = config
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.kernels = "compiled"
        self._workers = shared_workers(num_threads)
        self._weights = _read_weights(config, weights, dtype, max_positions, quantize)
        self._whole = quantize == "int8"
        self._stored: type[np.generic] = np.uint16 if dtype == torch.bfloat16 else np.float32
        norms = torch.from_numpy(self._weights.input_norms[-1])
        self._final_norm = norms.view(torch.bfloat16) if dtype == torch.bfloat16 else norms
        self._compile()

    @property
    def max_fine_rows(self) -> int | None:
        """Nothing is ever cut to keep bits."""
        return None

    def cache_shape(self, block_size: int) -> CacheShape:
        """Say what a cache for this model holds."""
        return self.config.cache_shape(block_size, self.dtype)

    def forward(self, step: ForwardInput, cache: KVCache) -> Tensor:
        """Run a step's tokens and store their keys and values: logits [M, V] float32.

        Only rows that `step.logit_rows` names pay for the vocabulary projection.
        """
        return self.forward_with_states(step, cache, FeatureSpec())[0]

    def forward_with_states(
        self, step: ForwardInput, cache: KVCache, wanted: FeatureSpec
    ) -> tuple[Tensor, HiddenStates]:
        """Do what `forward` does, and keep the hidden states that are wanted."""
        assert cache.shape == self.cache_shape(cache.shape.block_size), "a cache of another model"
        last = self.config.num_layers
        layers = wanted.union(FeatureSpec((last,))).layers if wanted.final else wanted.layers
        logits, kept = self._run(step, cache, layers)
        states = dict(zip(layers, kept, strict=True))
        final = self.final_norm(states[last]) if wanted.final else None
        return logits, HiddenStates({layer: states[layer] for layer in wanted.layers}, final)

    def _run(
        self, step: ForwardInput, cache: KVCache, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:  # [M, V], [layers, N, E]
        config = self.config
        groups, share = config.num_kv_heads, config.num_heads // config.num_kv_heads
        plan = plan_step(step, groups, share, config.head_size)
        x = np.empty((len(plan.positions), config.hidden_size), self._stored)
        scratch = new_scratch(
            config,
            plan,
            self._weights,
            x,
            num_logits=len(step.logit_rows),
            num_kept=len(layers),
        )
        self._workers.run(
            kernel.forward,
            self._weights,
            step_arrays(step, plan, layers),
            scratch,
            np.empty((0, 0), np.float32),
            view(cache.keys),
            view(cache.values),
            np.float32(config.norm_eps),
            np.arange(len(x)),
        )
        kept = torch.from_numpy(scratch.kept)
        return (
            torch.from_numpy(scratch.logits)[:, : config.vocab_size],
            kept.view(torch.bfloat16) if self.dtype == torch.bfloat16 else kept,
        )

    @property
    def embedding_panels(self) -> tuple[Array, Array]:
        """The table of embeddings in panels [1, ...] and its scales, for heads that share it."""
        return self._weights.embedding, self._weights.embedding_scales

    @property
    def head_panels(self) -> tuple[Array, Array] | None:
        """The vocabulary projection in panels [1, ...] and its bias; None: of eight bits."""
        return None if self._whole else (self._weights.head, self._weights.head_bias)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look tokens up, [n] -> [n, E], as the first layer gets them."""
        weights = self._weights
        return read_rows(weights.embedding[0], weights.embedding_scales[0], token_ids, self.dtype)

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Read the vocabulary projection's rows of some tokens, [n] -> [n, E]."""
        return read_rows(self._weights.head[0], self._weights.head_scales[0], token_ids, self.dtype)

    def final_norm(self, x: Tensor) -> Tensor:
        """Norm rows of the residual stream [n, E] as for the vocabulary projection."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return scaled.to(self.dtype) * self._final_norm

    def _compile(self) -> None:
        """Run one token, so that nobody's first request waits for compilation."""
        begin_s = time.perf_counter()
        step = ForwardInput.of_one_request(torch.zeros(1, dtype=torch.int64), 0, KEY_BLOCK)
        self.forward(step, KVCache(self.cache_shape(KEY_BLOCK), 1, self.device))
        taken_s = time.perf_counter() - begin_s
        if taken_s > TOLD_S:
            logger.info("compiled the kernels in %.1f s, once for this machine", taken_s)

    def run_linear_layers(self, num_rows: int) -> None:
        """Run the linear layers alone, on ones: the floor that a pass is measured against."""
        config = self.config
        widths = (config.hidden_size, config.num_heads * config.head_size, config.intermediate_size)
        kind = np.int16 if self._whole else np.float32
        narrow, mixed, inner = (np.ones((num_rows, width), kind) for width in widths)
        weights = self._weights
        panels = max(part.shape[1] for part in (weights.qkv, weights.gate_up, weights.out))
        arguments = (
            weights,
            narrow,
            mixed,
            inner,
            np.ones(num_rows, np.float32),
            np.empty((num_rows, panels * PANEL), self._stored),
            np.empty((num_rows, weights.head.shape[1] * PANEL), np.float32),
            new_counters(kernel.num_phases(config.num_layers)),
        )
        self._workers.run(kernel.linear_layers, *arguments)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Layers' matrices in panels, with their biases and scales [layers, panels * 16]."""

    panels: Array
    bias: Array
    scales: Array  # [layers, 0] unless weights are of eight bits

    def put(self, layer: int, weight: Tensor, bias: Tensor | None = None) -> None:
        fill(self.panels[layer], weight, self.scales[layer])
        if bias is not None:
            self.bias[layer, : len(bias)] = bias.float().numpy()


def _read_weights(
    config: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    max_positions: int,
    quantize: str,
) -> kernel.Weights:
    size, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    wide, narrow = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    matrices = [name for name, shape in expected_shapes(config).items() if len(shape) == 2]
    whole = quantize == "int8"
    form = "int8" if whole else "float32"
    if not whole and (dtype == torch.bfloat16 or all_fit_bf16(source, matrices)):
        form = "bfloat16"
    reader = WeightReader(source, torch.device("cpu"), dtype)
    # What is rounded to eight bits is read as it stands in the file, not rounded twice; and what
    # bfloat16 holds is not made four bytes first.
    as_read = {"int8": torch.float32, "bfloat16": torch.bfloat16, "float32": dtype}[form]
    weights = WeightReader(source, torch.device("cpu"), as_read)

    def matrix(outputs: int, inputs: int, count: int = layers) -> _Matrix:
        panels = allocate(count, outputs, inputs, form=form)
        padded = panels.shape[1] * PANEL
        scales = np.zeros((count, padded if whole else 0), np.float32)
        return _Matrix(panels, np.zeros((count, padded), np.float32), scales)

    def norms(count: int, width: int) -> Tensor:
        return torch.zeros(count, width, dtype=dtype)

    qkv, out = matrix(wide + 2 * narrow, size), matrix(size, wide)
    gate_up, down = matrix(2 * inner, size), matrix(size, inner)
    embedding = matrix(config.vocab_size, size, 1)
    input_norms, mlp_norms = norms(layers + 1, size), norms(layers, size)
    head_width = config.head_size if config.qk_norm else 0
    q_norms, k_norms = norms(layers, head_width), norms(layers, head_width)
    for index in range(layers):
        base = f"model.layers.{index}"
        attention, mlp = f"{base}.self_attn", f"{base}.mlp"
        parts = {f"{attention}.q_proj": wide}
        parts |= {f"{attention}.{name}_proj": narrow for name in ("k", "v")}
        bias = reader.stack_bias(parts) if config.qkv_bias else None
        qkv.put(index, weights.stack(parts, size, bias=False)[0], bias)
        parts = {f"{attention}.o_proj": size}
        bias = reader.stack_bias(parts) if config.o_bias else None
        out.put(index, weights.stack(parts, wide, bias=False)[0], bias)
        parts = {f"{mlp}.{name}_proj": inner for name in ("gate", "up")}
        gate_up.put(index, weights.stack(parts, size, bias=False)[0])
        down.put(index, weights.stack({f"{mlp}.down_proj": size}, inner, bias=False)[0])
        input_norms[index] = reader.read(f"{base}.input_layernorm.weight", size)
        mlp_norms[index] = reader.read(f"{base}.post_attention_layernorm.weight", size)
        if config.qk_norm:
            q_norms[index] = reader.read(f"{attention}.q_norm.weight", head_width)
            k_norms[index] = reader.read(f"{attention}.k_norm.weight", head_width)
    input_norms[layers] = reader.read("model.norm.weight", size)
    embedding.put(0, weights.read("model.embed_tokens.weight", config.vocab_size, size))
    head = embedding
    if not config.tie_embeddings:
        head = matrix(config.vocab_size, size, 1)
        head.put(0, weights.read("lm_head.weight", config.vocab_size, size))
    rotary = Rotary.from_frequencies(rope_frequencies(config), max_positions)
    windows = [window or EVERYTHING for window in config.sliding_windows]
    return kernel.Weights(
        embedding=embedding.panels,
        embedding_scales=embedding.scales,
        qkv=qkv.panels,
        qkv_bias=qkv.bias,
        qkv_scales=qkv.scales,
        out=out.panels,
        out_bias=out.bias,
        out_scales=out.scales,
        gate_up=gate_up.panels,
        gate_up_bias=gate_up.bias,
        gate_up_scales=gate_up.scales,
        down=down.panels,
        down_bias=down.bias,
        down_scales=down.scales,
        head=head.panels,
        head_bias=head.bias,
        head_scales=head.scales,
        input_norms=view(input_norms),
        mlp_norms=view(mlp_norms),
        q_norms=view(q_norms),
        k_norms=view(k_norms),
        skips_norm=np.zeros(layers + 1, np.bool_),
        fc=np.ascontiguousarray(qkv.panels[:1, :0]),
        fc_bias=np.ascontiguousarray(qkv.bias[:1, :0]),
        fc_scales=np.ascontiguousarray(qkv.scales[:1, :0]),
        windows=np.array(windows, np.int64),
        cos=rotary.cos.numpy(),
        sin=rotary.sin.numpy(),
    )
