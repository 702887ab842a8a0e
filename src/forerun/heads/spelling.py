"""How heads are spelt in `config.json` and in tensor names when we write them.

EAGLE-3: the speculators format, which vLLM reads and SGLang translates.

    architectures                     ["Eagle3Speculator"]
    eagle_aux_hidden_state_layer_ids  layers as vLLM counts them
    eagle_config                      the same for SGLang, one less
    norm_before_residual              always there, always false: vLLM takes true if it is missing,
                                      SGLang computes as if it were false
    transformer_layer_config          rope_theta and rope_scaling, and rope_parameters
    tensors                           layers.0.*; d2t (offsets, int64) and t2d (mask)

EAGLE-1 and Medusa: the layouts of the programs that they come from, since the speculators format
has no lasting place for them. Keys of ours: `num_speculative_tokens`, `draft_vocab_size`, and for
EAGLE-1 `base_model_name_or_path`. Tensors of ours: `d2t` and `t2d` as above, `lm_head.weight` for a
projection that Medusa heads share, and for EAGLE-1 `lm_head.weight`, `norm.weight` and
`layers.0.input_layernorm.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..model.arch import ModelConfig
from ..model.writer import to_hf
from .config import EagleConfig, Head, MedusaConfig
from .eagle_names import LAYER_NAMES, OUTER_NAMES, first_norm
from .feature_layers import IDS, nested_ids
from .vocabulary import mask_of, offsets_of

__all__ = ["spell_config", "spell_tensors"]

_FORMAT_VERSION = "0.7.0"  # of speculators, whose fields these are


def spell_config(
    head: Head, verifier: str, num_speculative_tokens: int, architectures: Sequence[str]
) -> dict[str, Any]:
    """Spell what goes into `config.json`."""
    dtype = next(iter(head.weights.values())).dtype
    config = head.config
    if isinstance(config, MedusaConfig):
        return _spell_medusa(config, verifier, num_speculative_tokens)
    if config.generation == 1:
        return _spell_eagle1(config, dtype, verifier, num_speculative_tokens)
    return _spell_eagle3(config, dtype) | {
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        }
    }


def spell_tensors(head: Head) -> dict[str, Tensor]:
    """Give every tensor the name that it has in the file."""
    config = head.config
    if isinstance(config, MedusaConfig):
        tensors = {_medusa_name(name, config): each for name, each in head.weights.items()}
    else:
        names = _eagle_names(config.generation)
        tensors = {_eagle_name(name, names): each for name, each in head.weights.items()}
    if head.draft_ids is not None:
        tensors["d2t"] = offsets_of(head.draft_ids)
        tensors["t2d"] = mask_of(head.draft_ids, config.vocab_size)
    return {name: each.contiguous() for name, each in tensors.items()}


def _spell_eagle3(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    # Without a projection of its own a head shares the target's: SGLang asks for null, vLLM too
    # then takes the target's vocabulary.
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _FORMAT_VERSION,
        "draft_vocab_size": config.draft_vocab_size if config.own_head else None,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": False,
        "norm_before_fc": config.norm_before_fc == "one",
        "fc_norm": config.norm_before_fc == "each",
        "norm_output": config.norm_output,
        "embed_requires_grad": config.own_embeddings,
        IDS: list(config.feature_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            IDS: nested_ids(config.feature_layers),
        },
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "transformer_layer_config": _spell_layer(config.layer, dtype),
    }


def _spell_eagle1(
    config: EagleConfig, dtype: torch.dtype, verifier: str, num_speculative_tokens: int
) -> dict[str, Any]:
    layer = _spell_layer(config.layer, dtype)
    return {
        "architectures": ["LlamaForCausalLM"],
        **layer,
        "bias": config.fc_bias,
        "draft_vocab_size": config.draft_vocab_size,
        "base_model_name_or_path": verifier,
        "num_speculative_tokens": num_speculative_tokens,
    }


def _spell_medusa(
    config: MedusaConfig, verifier: str, num_speculative_tokens: int
) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_blocks,
        "base_model_name_or_path": verifier,
        "version": "2",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "num_speculative_tokens": num_speculative_tokens,
    }


def _spell_layer(layer: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    window = layer.sliding_windows[0]
    spelt = to_hf(replace(layer, sliding_windows=(None,)), dtype)
    del spelt["architectures"]
    scaling: Mapping[str, Any] = spelt["rope_scaling"] or {"rope_type": "default"}
    spelt["rope_parameters"] = {**scaling, "rope_theta": layer.rope.theta}
    if window is not None:
        spelt |= {
            "layer_types": ["sliding_attention"],
            "sliding_window": window,
            "use_sliding_window": True,
        }
    return spelt


def _eagle_names(generation: int) -> dict[str, str]:
    inner = {ours: f"layers.0.{theirs}" for ours, theirs in LAYER_NAMES.items()}
    return inner | OUTER_NAMES | {first_norm(generation): "layers.0.input_layernorm"}


def _eagle_name(ours: str, names: Mapping[str, str]) -> str:
    module, _, kind = ours.rpartition(".")
    return f"{names.get(module, module)}.{kind}"  # fc_norm.{i} is the files' name too


def _medusa_name(ours: str, config: MedusaConfig) -> str:
    parts = ours.split(".")
    if parts[0] == "out":
        return "lm_head.weight"
    if parts[2] == "out":
        return f"{parts[1]}.{config.num_blocks}.weight"
    return f"{parts[1]}.{parts[3]}.linear.{parts[4]}"
