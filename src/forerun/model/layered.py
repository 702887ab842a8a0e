"""The decoder as a row of layers: linear layers of a library, and `Ops` for what lies between.

Runs on every device and in every format. What it computes is told here most plainly; the compiled
pass (`compiled`) is its fast twin on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..cache.kv_cache import CacheShape, KVCache
from ..types import FeatureSpec, ForwardInput, HiddenStates
from .arch import ModelConfig, rope_frequencies
from .bits import ExactRows, Shape, in_pieces
from .linear import Linear, pack_linear
from .ops import AttentionShape, Ops, Rotary
from .paged import PassPlan
from .reader import WeightReader
from .torch_ops import TorchOps
from .weights import WeightSource

__all__ = ["LayeredDecoder", "hidden_states", "linear_shapes"]


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
        return self.forward_with_states(step, cache, FeatureSpec())[0]

    @torch.inference_mode()
    def forward_with_states(
        self, step: ForwardInput, cache: KVCache, wanted: FeatureSpec
    ) -> tuple[Tensor, HiddenStates]:
        """Do what `forward` does, and keep the hidden states that are wanted."""
        assert cache.shape == self.cache_shape(cache.shape.block_size), "a cache of another model"
        self._ops.prepare(step, cache)
        states = self._run_layers(self._here(step.token_ids), step.num_fine, wanted.layers)
        logits = self.project(states[0], self._here(step.logit_rows), step.num_sampling_rows)
        return logits, hidden_states(states, wanted)

    @torch.inference_mode()
    def run_planned(self, plan: PassPlan, cache: KVCache, layers: Sequence[int] = ()) -> Tensor:
        """Run the layers as planned, in torch: see `hidden_states`. `project` makes logits of it.

        Reads nothing but the plan and the cache, and the host decides nothing by what is in them.
        """
        assert isinstance(self._ops, TorchOps), "compiled kernels plan for themselves"
        self._ops.follow(plan, cache)
        return self._run_layers(plan.token_ids, len(plan.token_ids), layers)

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Look tokens up, [n] -> [n, E], as the first layer gets them."""
        return functional.embedding(self._here(token_ids), self._embedding)

    @torch.inference_mode()
    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Read the vocabulary projection's rows of some tokens, [n] -> [n, E]."""
        if self.config.tie_embeddings:
            return self.embed(token_ids)
        # What is packed cannot be read; but multiplied by ones and zeros it says what it holds.
        size = self.config.hidden_size
        ones = torch.eye(size, dtype=self.dtype, device=self.device)
        return self._run(self._head, ones, size).T[self._here(token_ids)].contiguous()

    @torch.inference_mode()
    def final_norm(self, x: Tensor) -> Tensor:
        """Norm rows of the residual stream [n, E] as for the vocabulary projection."""
        return self._ops.norm(x, self._final_norm, self.config.norm_eps)

    @torch.inference_mode()
    def project(self, h: Tensor, logit_rows: Tensor, num_sampling_rows: int) -> Tensor:
        """Compute logits [M, V] float32 of rows [M] among h [N, E]."""
        if len(logit_rows) < len(h) or num_sampling_rows < len(logit_rows):
            h = h[logit_rows]
        return self._run(self._head, h, num_sampling_rows).float()

    def _here(self, ids: Tensor) -> Tensor:
        return ids.to(self.device, non_blocking=True)

    def _run_layers(
        self, token_ids: Tensor, num_fine: int, kept: Sequence[int] = ()
    ) -> Tensor:  # [1 + kept, N, E]
        ops, eps = self._ops, self.config.norm_eps
        x = functional.embedding(token_ids, self._embedding)  # [N, E]
        states = {0: x.clone()} if 0 in kept else {}
        h = ops.norm(x, self._layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            mixed = ops.attend(index, layer.attention, self._run(layer.qkv, h, num_fine))
            h = ops.add_norm(x, self._run(layer.out, mixed, num_fine), layer.mlp_norm, eps)
            active = ops.silu_multiply(self._run(layer.gate_up, h, num_fine))
            h = ops.add_norm(x, self._run(layer.down, active, num_fine), next_norm, eps)
            if index + 1 in kept:
                states[index + 1] = x.clone()
        return torch.stack([h, *(states[layer] for layer in kept)]) if kept else h[None]

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


def hidden_states(states: Tensor, wanted: FeatureSpec) -> HiddenStates:
    """Take what a pass leaves apart: [1 + layers, N, E], of which the first is the final one."""
    layers = dict(zip(wanted.layers, states[1:], strict=True))
    return HiddenStates(layers, states[0] if wanted.final else None)


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
