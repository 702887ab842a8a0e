"""How two engines read an EAGLE-3 head in the speculators format, after their source.

vLLM: `transformers_utils/configs/speculators/{base,algos}.py`, `llama_eagle3.py` and the runner's
choice of layers. SGLang: `get_config` lays the layer's fields under the file's own, and the layers
come from `eagle_config` alone, one more each. Neither engine is needed to ask what it would do.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["AsEngine", "as_sglang", "as_vllm", "vllm_draft_ids", "vllm_weight_names"]

_VLLM_CLASSES = {"qwen3": "Eagle3Qwen3ForCausalLM", "llama": "Eagle3LlamaForCausalLM"}


@dataclass(frozen=True, slots=True)
class AsEngine:
    """What an engine makes of a head."""

    architecture: str
    layers: tuple[int, ...]  # counted as the residual stream after so many layers
    norm_before_residual: bool
    norm_before_fc: str
    norm_output: bool
    draft_vocab_size: int
    num_speculative_tokens: int
    fc_inputs: int
    layer: Mapping[str, Any]


def as_vllm(config: Mapping[str, Any], num_layers: int) -> AsEngine:
    """Read a configuration for a target of `num_layers` as vLLM does."""
    told = copy.deepcopy(dict(config))
    assert told["speculators_model_type"] == "eagle3"
    count = told["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert told["speculators_config"]["verifier"]["name_or_path"]
    layer = told["transformer_layer_config"]
    layer["draft_vocab_size"] = told.get("draft_vocab_size")
    if told.get("target_hidden_size") is not None:
        layer["target_hidden_size"] = told["target_hidden_size"]
    layer["norm_before_residual"] = told.get("norm_before_residual", True)
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        layer[key] = told.get(key, False)
    if told.get("eagle_aux_hidden_state_layer_ids"):
        layer["eagle_aux_hidden_state_layer_ids"] = told["eagle_aux_hidden_state_layer_ids"]
    default = [2, num_layers // 2, num_layers - 3]
    layers = tuple(layer.get("eagle_aux_hidden_state_layer_ids") or default)
    assert not (layer["norm_before_fc"] and layer["fc_norm"])
    return AsEngine(
        architecture=_VLLM_CLASSES[layer.get("model_type", "llama")],
        layers=layers,
        norm_before_residual=layer["norm_before_residual"],
        norm_before_fc="one" if layer["norm_before_fc"] else "each" if layer["fc_norm"] else "none",
        norm_output=layer["norm_output"],
        draft_vocab_size=layer["draft_vocab_size"] or layer["vocab_size"],
        num_speculative_tokens=count,
        fc_inputs=len(layers) * layer.get("target_hidden_size", layer["hidden_size"]),
        layer=layer,
    )


def as_sglang(config: Mapping[str, Any], num_layers: int) -> AsEngine:
    """Read a configuration for a target of `num_layers` as SGLang does."""
    assert config["architectures"] == ["Eagle3Speculator"]
    flat = {**config["transformer_layer_config"], **config}
    nested = flat.get("eagle_config") or {}
    assert nested.get("use_aux_hidden_state", True)
    ids = nested.get("eagle_aux_hidden_state_layer_ids")
    default = (2, num_layers // 2, num_layers - 3)
    return AsEngine(
        architecture="LlamaForCausalLMEagle3",
        layers=default if ids is None else tuple(each + 1 for each in ids),
        norm_before_residual=False,  # never read
        norm_before_fc="one" if flat["norm_before_fc"] else "each" if flat["fc_norm"] else "none",
        norm_output=flat["norm_output"],
        draft_vocab_size=flat["draft_vocab_size"] or flat["vocab_size"],
        num_speculative_tokens=0,  # told on the command line
        fc_inputs=3 * (flat["target_hidden_size"] or flat["hidden_size"]),
        layer=flat,
    )


def vllm_weight_names(read: AsEngine) -> set[str]:
    """Name what vLLM's model has a place for, as files call it."""
    names = {"fc.weight", "norm.weight", "lm_head.weight"}
    names |= {f"layers.0.self_attn.{each}_proj.weight" for each in "qkvo"}
    names |= {f"layers.0.mlp.{each}_proj.weight" for each in ("gate", "up", "down")}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    names |= {f"layers.0.{each}.weight" for each in norms}
    if read.layer.get("attention_bias"):
        names |= {f"layers.0.self_attn.{each}_proj.bias" for each in "qkvo"}
    if read.architecture == "Eagle3Qwen3ForCausalLM":
        names |= {f"layers.0.self_attn.{each}_norm.weight" for each in "qk"}
    if read.norm_before_fc == "one":
        names.add("input_norm.weight")
    if read.norm_before_fc == "each":
        names |= {f"fc_norm.{index}.weight" for index in range(len(read.layers))}
    return names


def vllm_draft_ids(tensors: Mapping[str, Tensor], draft_vocab_size: int) -> list[int]:
    """Say which of the target's tokens vLLM takes each draft token for."""
    return (torch.arange(draft_vocab_size) + tensors["d2t"]).tolist()
