"""The decoder as a row of layers: linear layers of a library, and `Ops` for what lies between.

Runs on every device and in every format. What it computes is told here most plainly; the compiled
pass (`compiled`) is its fast twin on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..cache.kv_cache import CacheShape, KVCache
from ..types import ForwardInput
from .arch import ModelConfig, rope_frequencies
from .bits import ExactRows, Shape, in_pieces
from .linear import Linear, pack_linear
from .ops import AttentionShape, Ops, Rotary
from .paged import PassPlan
from .reader import WeightReader
from .torch_ops import TorchOps
from .weights import WeightSource

__all__ = ["LayeredDecoder", "linear_shapes"]


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor  # [E]
    qkv: Linear  # [E] -> [(H + 2G) * D]
    attention: AttentionShape
    out: Linear  # [H * D] -> [E]
    mlp_norm: Tensor  # [E]
    gate_up: Linear  # [E] -> [2F]
    down: Linear  # [F] -> [E]


class LayeredDecoder:
    """The target's weights and its forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kernels: str,
        max_positions: int,
        num_threads: int,
        exact: ExactRows | None = None,
        most_rows: int | None = None,
    ) -> None:
        """Read the weights, laid out for the device; `kernels` is torch or numba.

        `exact` has rows keep their bits in any company; `most_rows` is what a step can hold then.

        Raises:
            ModelFileError: a weight is missing, has another shape, or holds NaN or infinity.
        """
        self.config = config
        self.device = device
        self.dtype = dtype
        self._max_rows = None if exact is None or most_rows is None else exact.max_rows
        if self._max_rows is not None and most_rows is not None and self._max_rows >= most_rows:
            self._max_rows = None  # nothing is ever cut
        reader = WeightReader(weights, device, dtype)
        packer = _Packer(reader, exact)
        size = config.hidden_size
        self._embedding = reader.read("model.embed_tokens.weight", config.vocab_size, size)
        self._layers = [_read_layer(packer, config, index) for index in range(config.num_layers)]
        self._final_norm = reader.read("model.norm.weight", size)
        table = self._embedding
        if not config.tie_embeddings:
            table = reader.read("lm_head.weight", config.vocab_size, size)
        self._head = packer.pack(table, None)
        rotary = Rotary.from_frequencies(rope_frequencies(config), max_positions)
        self.kernels = kernels
        self._ops = self._make_ops(rotary, num_threads)

    @property
    def max_fine_rows(self) -> int | None:
        """Rows of a small piece, where rows go in pieces of two kinds (`bits`)."""
        return self._max_rows

    def cache_shape(self, block_size: int) -> CacheShape:
        """Say what a cache for this model holds."""
        return self.config.cache_shape(block_size, self.dtype)

    @torch.inference_mode()
    def forward(self, step: ForwardInput, cache: KVCache) -> Tensor:
        """Run a step's tokens and store their keys and values: logits [M, V] float32.

        Only rows that `step.logit_rows` names pay for the vocabulary projection. The step's tensors
        may lie on the host, whatever the device: then the device is given work and asked nothing.
        """
        assert cache.shape == self.cache_shape(cache.shape.block_size), "a cache of another model"
        self._ops.prepare(step, cache)
        h = self._run_layers(self._here(step.token_ids), step.num_fine)
        return self.project(h, self._here(step.logit_rows), step.num_sampling_rows)

    @torch.inference_mode()
    def run_planned(self, plan: PassPlan, cache: KVCache) -> Tensor:
        """Run the layers as planned, in torch: [N, E], which `project` turns into logits.

        Reads nothing but the plan and the cache, and the host decides nothing by what is in them.
        """
        assert isinstance(self._ops, TorchOps), "compiled kernels plan for themselves"
        self._ops.follow(plan, cache)
        return self._run_layers(plan.token_ids, len(plan.token_ids))

    @torch.inference_mode()
    def project(self, h: Tensor, logit_rows: Tensor, num_sampling_rows: int) -> Tensor:
        """Compute logits [M, V] float32 of rows [M] among h [N, E]."""
        if len(logit_rows) < len(h) or num_sampling_rows < len(logit_rows):
            h = h[logit_rows]
        return self._run(self._head, h, num_sampling_rows).float()

    def _here(self, ids: Tensor) -> Tensor:
        return ids.to(self.device, non_blocking=True)

    def _run_layers(self, token_ids: Tensor, num_fine: int) -> Tensor:
        ops, eps = self._ops, self.config.norm_eps
        x = functional.embedding(token_ids, self._embedding)  # [N, E]
        h = ops.norm(x, self._layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            mixed = ops.attend(index, layer.attention, self._run(layer.qkv, h, num_fine))
            h = ops.add_norm(x, self._run(layer.out, mixed, num_fine), layer.mlp_norm, eps)
            active = ops.silu_multiply(self._run(layer.gate_up, h, num_fine))
            h = ops.add_norm(x, self._run(layer.down, active, num_fine), next_norm, eps)
        return h

    def _run(self, linear: Linear, x: Tensor, num_fine: int) -> Tensor:
        """Run a layer, in pieces where that keeps bits."""
        if self._max_rows is None or not len(x):
            return linear(x)
        return in_pieces(linear, x, num_fine, self._max_rows)

    @torch.inference_mode()
    def run_linear_layers(self, num_rows: int) -> None:
        """Run the linear layers alone, on noise: the floor that a pass is measured against."""
        config = self.config
        widths = (config.hidden_size, config.num_heads * config.head_size, config.intermediate_size)
        narrow, mixed, inner = (
            torch.randn(num_rows, width, device=self.device).to(self.dtype) for width in widths
        )
        for layer in self._layers:
            layer.qkv(narrow)
            layer.out(mixed)
            layer.gate_up(narrow)
            layer.down(inner)
        self._head(narrow)

    def _make_ops(self, rotary: Rotary, num_threads: int) -> Ops:
        if self.kernels == "numba":
            from .numba_ops import NumbaOps  # here: numba takes a second to import

            return NumbaOps(rotary, self._layers[0].attention, num_threads)
        return TorchOps(Rotary(rotary.cos.to(self.device), rotary.sin.to(self.device)))


def linear_shapes(config: ModelConfig) -> list[Shape]:
    """List (inputs, outputs) of every linear layer of a pass."""
    size, inner = config.hidden_size, config.intermediate_size
    wide, narrow = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    layer = [(size, wide + 2 * narrow), (wide, size), (size, 2 * inner), (inner, size)]
    return [*layer * config.num_layers, (size, config.vocab_size)]


def _read_layer(packer: _Packer, config: ModelConfig, index: int) -> _Layer:
    base = f"model.layers.{index}"
    attention, mlp = f"{base}.self_attn", f"{base}.mlp"
    size, inner = config.hidden_size, config.intermediate_size
    wide, narrow = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    qkv = {
        f"{attention}.q_proj": wide,
        f"{attention}.k_proj": narrow,
        f"{attention}.v_proj": narrow,
    }
    gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}

    def head_norm(name: str) -> Tensor | None:
        if not config.qk_norm:
            return None
        return packer.reader.read(f"{attention}.{name}.weight", config.head_size)

    return _Layer(
        input_norm=packer.reader.read(f"{base}.input_layernorm.weight", size),
        qkv=packer.fuse(qkv, size, bias=config.qkv_bias),
        attention=AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            window=config.sliding_windows[index],
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            norm_eps=config.norm_eps,
        ),
        out=packer.fuse({f"{attention}.o_proj": size}, wide, bias=config.o_bias),
        mlp_norm=packer.reader.read(f"{base}.post_attention_layernorm.weight", size),
        gate_up=packer.fuse(gate_up, size, bias=False),
        down=packer.fuse({f"{mlp}.down_proj": size}, inner, bias=False),
    )


@dataclass(frozen=True, slots=True)
class _Packer:
    """Read linear layers in their layout, padded where bits are to be kept."""

    reader: WeightReader
    exact: ExactRows | None

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        linear = pack_linear(weight, bias)
        outputs, inputs = weight.shape
        return linear if self.exact is None else self.exact.pad((inputs, outputs), linear)

    def fuse(self, parts: dict[str, int], num_inputs: int, *, bias: bool) -> Linear:
        """Stack linear layers that share their input into one."""
        return self.pack(*self.reader.stack(parts, num_inputs, bias=bias))
