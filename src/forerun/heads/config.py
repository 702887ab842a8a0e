"""What a draft head is, as data: the numbers that decide its maths, and its weights by name.

Names are ours, whatever the files said; `expected_shapes` lists them. Nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..model.arch import ModelConfig

__all__ = ["EagleConfig", "Head", "HeadConfig", "MedusaConfig", "expected_shapes"]


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """An EAGLE head: one decoder layer that continues the target's hidden states."""

    generation: int  # 1 (the weights of EAGLE-1 and EAGLE-2) or 3
    layer: ModelConfig  # the one decoder layer: num_layers 1, family llama or qwen3
    target_hidden_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int  # <= vocab_size; equal: no map
    # EAGLE-3: the residual stream after so many of the target's layers, one entry per input.
    # EAGLE-1: () = the target's hidden state after its final norm.
    feature_layers: tuple[int, ...]
    fc_bias: bool
    input_norm: bool  # the layer norms its attention input (EAGLE-1 originals: no; EAGLE-3: always)
    output_norm: bool  # a norm before the vocabulary projection (EAGLE-1 originals: no)
    norm_before_residual: bool  # EAGLE-3: the residual is the normed input
    norm_before_fc: str  # "none", "one" (over the concatenated inputs) or "each" (one per input)
    norm_output: bool  # EAGLE-3.1: the recurrent state is the normed output
    own_embeddings: bool  # else the target's
    own_head: bool  # else the target's vocabulary projection (its rows named by draft_ids)


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Medusa heads: each looks one position further, from the same hidden state."""

    num_heads: int  # head i predicts token t + 2 + i from the final-normed hidden state of t
    num_blocks: int  # residual blocks per head: x + SiLU(W x + b)
    hidden_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int  # <= vocab_size; equal: no map
    shared_head: bool  # all heads share one vocabulary projection
    own_head: bool  # else the projection is the target's own
    block_bias: bool


HeadConfig = EagleConfig | MedusaConfig


@dataclass(frozen=True, slots=True, eq=False)  # tensors have no single answer to ==
class Head:
    """A draft head that was read: what it is, its weights, and what its files say around it."""

    config: HeadConfig
    weights: Mapping[str, Tensor]  # canonical names, in the dtype they are stored in
    draft_ids: Tensor | None  # [D] int64: the target's id of each draft token; None: equal vocab
    verifier: str | None  # which target the files say they belong to
    num_speculative_tokens: int | None
    notes: tuple[str, ...]  # what was ignored or decided, in words for people


def expected_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Name every tensor that a head of this shape has, and its shape."""
    if isinstance(config, MedusaConfig):
        return _medusa_shapes(config)
    return _eagle_shapes(config)


def _eagle_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    layer = config.layer
    hidden, ffn, is_third = layer.hidden_size, layer.intermediate_size, config.generation == 3
    num_features = len(config.feature_layers)
    features = num_features * config.target_hidden_size
    # EAGLE-3 keeps embedding and state apart up to attention; EAGLE-1 joins them in fc.
    fc_inputs = features if is_third else hidden + config.target_hidden_size
    attention_inputs = 2 * hidden if is_third else hidden
    q_size, kv_size = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, fc_inputs)}
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if config.norm_before_fc == "one":
        shapes["fc_norm.weight"] = (features,)
    elif config.norm_before_fc == "each":
        for index in range(num_features):
            shapes[f"fc_norm.{index}.weight"] = (config.target_hidden_size,)
    if is_third:
        shapes |= {"embed_norm.weight": (hidden,), "hidden_norm.weight": (hidden,)}
    elif config.input_norm:
        shapes["input_norm.weight"] = (hidden,)
    for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
        shapes[f"layer.{name}.weight"] = (size, attention_inputs)
        if layer.qkv_bias:
            shapes[f"layer.{name}.bias"] = (size,)
    shapes["layer.o.weight"] = (hidden, q_size)
    if layer.o_bias:
        shapes["layer.o.bias"] = (hidden,)
    if layer.qk_norm:
        shapes |= {f"layer.{name}.weight": (layer.head_size,) for name in ("q_norm", "k_norm")}
    shapes |= {
        "layer.mlp_norm.weight": (hidden,),
        "layer.gate.weight": (ffn, hidden),
        "layer.up.weight": (ffn, hidden),
        "layer.down.weight": (hidden, ffn),
    }
    if config.output_norm:
        shapes["norm.weight"] = (hidden,)
    if config.own_head:
        shapes["head.weight"] = (config.draft_vocab_size, hidden)
    if config.own_embeddings:
        shapes["embedding.weight"] = (config.vocab_size, hidden)
    return shapes


def _medusa_shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    hidden, out = config.hidden_size, (config.draft_vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config.num_heads):
        for block in range(config.num_blocks):
            shapes[f"heads.{head}.blocks.{block}.weight"] = (hidden, hidden)
            if config.block_bias:
                shapes[f"heads.{head}.blocks.{block}.bias"] = (hidden,)
        if config.own_head and not config.shared_head:
            shapes[f"heads.{head}.out.weight"] = out
    if config.own_head and config.shared_head:
        shapes["out.weight"] = out
    return shapes
