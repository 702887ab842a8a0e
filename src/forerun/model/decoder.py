"""One decoder for every supported family: Llama, Mistral, SmolLM2, Qwen2, Qwen3.

What differs between families is data (biases, head norms, windows, rotary scaling), never a
subclass. Nothing here knows about requests, drafts or sampling: verification is this forward
pass over a few more rows. Three ways to compute it, by what runs it:

    compiled   the CPU, whole passes in kernels of ours (`compiled`)
    numba      the CPU, linear layers from oneDNN, kernels of ours between them (`layered`)
    torch      any device and format, plain torch: the reference (`layered`)
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..cache.kv_cache import CacheShape, KVCache
from ..device import has_amx
from ..errors import ConfigError
from ..types import FeatureSpec, ForwardInput, HiddenStates
from .arch import ModelConfig
from .bits import ExactRows
from .layered import LayeredDecoder
from .weights import WeightSource

__all__ = ["Decoder", "choose_kernels", "load_decoder"]

KEY_BLOCK = 32  # positions of a cache block that the kernels are written for


class Decoder(Protocol):
    """The target's weights and its forward pass."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kernels: str

    @property
    def max_fine_rows(self) -> int | None:
        """Rows of a small piece, where rows go in pieces of two kinds (`bits`)."""
        ...

    def cache_shape(self, block_size: int) -> CacheShape:
        """Say what a cache for this model holds."""
        ...

    def forward(self, step: ForwardInput, cache: KVCache) -> Tensor:
        """Run a step's tokens and store their keys and values: logits [M, V] float32.

        Only rows that `step.logit_rows` names pay for the vocabulary projection.
        """
        ...

    def forward_with_states(
        self, step: ForwardInput, cache: KVCache, wanted: FeatureSpec
    ) -> tuple[Tensor, HiddenStates]:
        """Do what `forward` does, and keep the hidden states that are wanted."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look tokens up, [n] -> [n, E], as the first layer gets them."""
        ...

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Read the vocabulary projection's rows of some tokens, [n] -> [n, E]."""
        ...

    def final_norm(self, x: Tensor) -> Tensor:
        """Norm rows of the residual stream [n, E] as for the vocabulary projection."""
        ...

    def run_linear_layers(self, num_rows: int) -> None:
        """Run the linear layers alone, on noise: the floor that a pass is measured against."""
        ...


def load_decoder(
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
    quantize: str = "none",
) -> Decoder:
    """Read the weights, laid out for the device.

    `exact` has rows of layers from oneDNN keep their bits in any company; `most_rows` is what a
    step can hold then. `quantize` rounds weights to fewer bits (int8), in compiled passes only.

    Raises:
        ConfigError: the kernels asked for do not fit the device, format or model.
        ModelFileError: a weight is missing, has another shape, or holds NaN or infinity.
    """
    kernels = choose_kernels(kernels, device, dtype, config, block_size, quantize)
    positions = max_positions or config.max_positions
    if kernels == "compiled":
        from .compiled import CompiledDecoder  # here: numba takes a second to import

        return CompiledDecoder(
            config,
            weights,
            dtype=dtype,
            max_positions=positions,
            num_threads=num_threads,
            quantize=quantize,
        )
    return LayeredDecoder(
        config,
        weights,
        device=device,
        dtype=dtype,
        kernels=kernels,
        max_positions=positions,
        num_threads=num_threads,
        exact=exact,
        most_rows=most_rows,
    )


def choose_kernels(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    config: ModelConfig,
    block_size: int,
    quantize: str = "none",
) -> str:
    """Turn `auto` into what is fastest here: compiled passes, unless AMX multiplies faster.

    Weights of fewer bits are the compiled pass's alone.
    """
    if quantize != "none":
        if name not in ("auto", "compiled"):
            raise ConfigError(
                f"quantize={quantize!r} needs kernels='compiled'; kernels={name!r} has no such "
                "layers"
            )
        name = "compiled"
    on_cpu = device.type == "cpu" and dtype != torch.float16
    whole_vectors = config.head_size % 32 == 0 and config.intermediate_size % 16 == 0
    fits = {
        "numba": on_cpu and whole_vectors and block_size == KEY_BLOCK,
        "compiled": on_cpu
        and whole_vectors
        and config.hidden_size % 16 == 0
        and block_size == KEY_BLOCK,
        "torch": True,
    }
    if name == "auto":
        tiles = has_amx() and dtype == torch.bfloat16  # AMX does nothing for float32
        best = ("numba", "torch") if tiles else ("compiled", "numba", "torch")
        return next(each for each in best if fits[each])
    if not fits[name]:
        hidden = ", a hidden size that is one of 16" if name == "compiled" else ""
        raise ConfigError(
            f"kernels={name!r} needs the CPU, bfloat16 or float32, a head size that is a multiple "
            f"of 32, an intermediate size that is one of 16{hidden}, and block_size={KEY_BLOCK}; "
            f"here: {device.type}, {dtype}, {config.head_size}, {config.intermediate_size}, "
            f"{config.hidden_size}, {block_size}. Use kernels='auto'"
        )
    return name
