"""One decoder for every supported family: Llama, Mistral, SmolLM2, Qwen2, Qwen3.

What differs between families is data (biases, head norms, windows, rotary scaling), never a
subclass. Nothing here knows about requests, drafts or sampling: verification is this forward
pass over a few more rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..cache.kv_cache import CacheShape, KVCache
from ..errors import ConfigError, ModelFileError
from ..types import ForwardInput
from .arch import ModelConfig, rope_frequencies
from .bits import ExactRows, Shape, in_pieces
from .linear import Linear, pack_linear
from .ops import AttentionShape, Ops, Rotary, TorchOps
from .weights import WeightSource

__all__ = ["Decoder", "choose_kernels", "linear_shapes"]

KEY_BLOCK = 32  # positions of a cache block that the compiled kernels are written for


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor  # [E]
    qkv: Linear  # [E] -> [(H + 2G) * D]
    attention: AttentionShape
    out: Linear  # [H * D] -> [E]
    mlp_norm: Tensor  # [E]
    gate_up: Linear  # [E] -> [2F]
    down: Linear  # [F] -> [E]


class Decoder:
    """The target's weights and its forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kernels: str = "auto",
        max_positions: int | None = None,
        num_threads: int = 1,
        block_size: int = KEY_BLOCK,
        exact: ExactRows | None = None,
        most_rows: int | None = None,
    ) -> None:
        """Read the weights, laid out for the device.

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
        reader = _Reader(weights, device, dtype, exact)
        size = config.hidden_size
        self._embedding = reader.read("model.embed_tokens.weight", config.vocab_size, size)
        self._layers = [_read_layer(reader, config, index) for index in range(config.num_layers)]
        self._final_norm = reader.read("model.norm.weight", size)
        table = self._embedding
        if not config.tie_embeddings:
            table = reader.read("lm_head.weight", config.vocab_size, size)
        self._head = reader.pack(table, None)
        positions = max_positions or config.max_positions
        rotary = Rotary.from_frequencies(rope_frequencies(config), positions)
        self.kernels = choose_kernels(kernels, device, dtype, config, block_size)
        self._ops = self._make_ops(rotary, num_threads)

    @property
    def max_fine_rows(self) -> int | None:
        """Rows of a small piece, where rows go in pieces of two kinds (`bits`)."""
        return self._max_rows

    def cache_shape(self, block_size: int) -> CacheShape:
        """Say what a cache for this model holds."""
        return CacheShape(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_size=self.config.head_size,
            block_size=block_size,
            dtype=self.dtype,
        )

    @torch.inference_mode()
    def forward(self, step: ForwardInput, cache: KVCache) -> Tensor:
        """Run a step's tokens and store their keys and values: logits [M, V] float32.

        Only rows that `step.logit_rows` names pay for the vocabulary projection.
        """
        assert cache.shape == self.cache_shape(cache.shape.block_size), "a cache of another model"
        assert self.kernels == "torch" or cache.shape.block_size == KEY_BLOCK, "wrong block size"
        ops, eps = self._ops, self.config.norm_eps
        ops.prepare(step, cache)
        x = functional.embedding(step.token_ids, self._embedding)  # [N, E]
        h = ops.norm(x, self._layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            mixed = ops.attend(index, layer.attention, self._run(layer.qkv, h, step.num_fine))
            h = ops.add_norm(x, self._run(layer.out, mixed, step.num_fine), layer.mlp_norm, eps)
            active = ops.silu_multiply(self._run(layer.gate_up, h, step.num_fine))
            h = ops.add_norm(x, self._run(layer.down, active, step.num_fine), next_norm, eps)
        if len(step.logit_rows) < len(h) or step.num_sampling_rows < len(step.logit_rows):
            h = h[step.logit_rows]
        return self._run(self._head, h, step.num_sampling_rows).float()

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


def choose_kernels(
    name: str, device: torch.device, dtype: torch.dtype, config: ModelConfig, block_size: int
) -> str:
    """Turn `auto` into the compiled kernels where they apply, else torch."""
    on_cpu = device.type == "cpu" and dtype != torch.float16
    whole_vectors = config.head_size % 32 == 0 and config.intermediate_size % 16 == 0
    fits = on_cpu and whole_vectors and block_size == KEY_BLOCK
    if name == "auto":
        return "numba" if fits else "torch"
    if name == "numba" and not fits:
        raise ConfigError(
            f"kernels='numba' needs the CPU, bfloat16 or float32, a head size that is a multiple "
            f"of 32, an intermediate size that is one of 16, and block_size={KEY_BLOCK}; here: "
            f"{device.type}, {dtype}, {config.head_size}, {config.intermediate_size}, "
            f"{block_size}. Use kernels='auto'"
        )
    return name


def _read_layer(reader: _Reader, config: ModelConfig, index: int) -> _Layer:
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
        return reader.read(f"{attention}.{name}.weight", config.head_size)

    return _Layer(
        input_norm=reader.read(f"{base}.input_layernorm.weight", size),
        qkv=reader.fuse(qkv, size, bias=config.qkv_bias),
        attention=AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            window=config.sliding_windows[index],
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            norm_eps=config.norm_eps,
        ),
        out=reader.fuse({f"{attention}.o_proj": size}, wide, bias=config.o_bias),
        mlp_norm=reader.read(f"{base}.post_attention_layernorm.weight", size),
        gate_up=reader.fuse(gate_up, size, bias=False),
        down=reader.fuse({f"{mlp}.down_proj": size}, inner, bias=False),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Read weights into place. Every buffer starts as NaN, so that a gap cannot pass."""

    source: WeightSource
    device: torch.device
    dtype: torch.dtype
    exact: ExactRows | None

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        linear = pack_linear(weight, bias)
        outputs, inputs = weight.shape
        return linear if self.exact is None else self.exact.pad((inputs, outputs), linear)

    def read(self, name: str, *shape: int) -> Tensor:
        return self._gather({name: shape[0]}, shape[1:])

    def fuse(self, parts: dict[str, int], num_inputs: int, *, bias: bool) -> Linear:
        """Stack linear layers that share their input into one."""
        weight = self._gather(_suffixed(parts, ".weight"), (num_inputs,))
        offset = self._gather(_suffixed(parts, ".bias"), ()) if bias else None
        return self.pack(weight, offset)

    def _gather(self, parts: dict[str, int], inner: tuple[int, ...]) -> Tensor:
        target = torch.full(
            (sum(parts.values()), *inner), torch.nan, dtype=self.dtype, device=self.device
        )
        places: tuple[Tensor, ...] = target.split(list(parts.values()))
        for name, place in zip(parts, places, strict=True):
            if name not in self.source.names:
                raise ModelFileError(f"weight {name!r} is missing")
            weight = self.source.read(name)
            if weight.shape != place.shape:
                raise ModelFileError(
                    f"weight {name!r} has shape {list(weight.shape)}, expected {list(place.shape)}"
                )
            place.copy_(weight)
        if not torch.isfinite(target).all():
            raise ModelFileError(
                f"weights {', '.join(parts)} hold NaN or infinity as {self.dtype}; the file is "
                "damaged, or the format too narrow: try dtype='float32'"
            )
        return target


def _suffixed(parts: dict[str, int], suffix: str) -> dict[str, int]:
    return {name + suffix: rows for name, rows in parts.items()}
