"""Tiny random draft heads, written to disk in every layout that is found in the wild.

Names and fields are spelt here as the programs that first wrote them do, and independently of the
code that reads them. A layout is a function `(folder, head)`; `LAYOUTS` lists those of a kind.
Files can be spoilt afterwards: `edit_config`, `edit_tensors`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.heads.config import EagleConfig, Head, HeadConfig, MedusaConfig, expected_shapes
from forerun.model.arch import ModelConfig, RopeConfig

VERIFIER = "somebody/target"
TARGET = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    norm_eps=1e-5,
    rope=RopeConfig(10_000.0),
    max_positions=128,
    tie_embeddings=True,
    qkv_bias=False,
    o_bias=False,
    qk_norm=False,
    sliding_windows=(None,) * 8,
    bos_token_id=0,
    eos_token_ids=(1,),
)


def eagle_config(target: ModelConfig, generation: int, **options: Any) -> EagleConfig:
    """Describe a plain EAGLE head for `target`, as its authors made them; change it by `options`.

    Options of the layer itself are given as `layer_options`.
    """
    layer_options = {"num_layers": 1, "sliding_windows": (None,), "tie_embeddings": False}
    layer_options |= {"family": "llama", "qk_norm": False, "qkv_bias": False, "o_bias": False}
    layer = replace(target, **(layer_options | options.pop("layer_options", {})))
    third = generation == 3
    n = target.num_layers
    config = EagleConfig(
        generation=generation,
        layer=layer,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size // 2 if third else target.vocab_size,
        feature_layers=(2, n // 2, n - 3) if third else (),
        fc_bias=not third,
        input_norm=third,
        output_norm=third,
        norm_before_residual=False,
        norm_before_fc="none",
        norm_output=False,
        own_embeddings=False,
        own_head=third,
    )
    return replace(config, **options)


def medusa_config(target: ModelConfig, **options: Any) -> MedusaConfig:
    """Describe plain Medusa heads for `target`; change them by `options`."""
    config = MedusaConfig(
        num_heads=3,
        num_blocks=1,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        shared_head=False,
        own_head=True,
        block_bias=True,
    )
    return replace(config, **options)


def make_head(config: HeadConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Head:
    """Draw a head's weights, and its draft vocabulary where it has one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and not name.endswith(".bias")
        drawn = 1 + 0.3 * noise if is_norm else noise / shape[-1] ** 0.5
        weights[name] = drawn.to(dtype)
    ids = None
    if config.draft_vocab_size < config.vocab_size:
        order = torch.randperm(config.vocab_size, generator=generator)
        ids = order[: config.draft_vocab_size].sort().values
    return Head(config, weights, ids, verifier=None, num_speculative_tokens=None, notes=())


def same_head(first: Head, second: Head) -> bool:
    """Say whether two heads are the same but for what is said around them."""
    if first.config != second.config or first.weights.keys() != second.weights.keys():
        return False
    pairs = [(each, second.weights[name]) for name, each in first.weights.items()]
    if (first.draft_ids is None) != (second.draft_ids is None):
        return False
    if first.draft_ids is not None and second.draft_ids is not None:
        pairs.append((first.draft_ids, second.draft_ids))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


# What EAGLE's programs call the tensors of the layer, and those around it.
_LAYER = {
    "layer.q": "self_attn.q_proj",
    "layer.k": "self_attn.k_proj",
    "layer.v": "self_attn.v_proj",
    "layer.o": "self_attn.o_proj",
    "layer.q_norm": "self_attn.q_norm",
    "layer.k_norm": "self_attn.k_norm",
    "layer.gate": "mlp.gate_proj",
    "layer.up": "mlp.up_proj",
    "layer.down": "mlp.down_proj",
    "layer.mlp_norm": "post_attention_layernorm",
    "embed_norm": "input_layernorm",
    "input_norm": "input_layernorm",
    "hidden_norm": "hidden_norm",
}
_AROUND = {
    "fc_norm": "input_norm",
    "head": "lm_head",
    "embedding": "embed_tokens",
}


def eagle_tensors(head: Head, layer_prefix: str) -> dict[str, Tensor]:
    """Name an EAGLE head's tensors as files do."""
    tensors = {}
    for name, weight in head.weights.items():
        module, kind = name.rsplit(".", 1)
        theirs = f"{layer_prefix}{_LAYER[module]}" if module in _LAYER else module
        tensors[f"{_AROUND.get(theirs, theirs)}.{kind}"] = weight.clone()
    return tensors | map_tensors(head)


def map_tensors(head: Head) -> dict[str, Tensor]:
    """Spell the draft vocabulary as offsets and a mask."""
    if head.draft_ids is None:
        return {}
    ids = head.draft_ids.tolist()
    kept = set(ids)
    return {
        "d2t": torch.tensor([target - draft for draft, target in enumerate(ids)]),
        "t2d": torch.tensor([token in kept for token in range(head.config.vocab_size)]),
    }


def layer_fields(layer: ModelConfig) -> dict[str, Any]:
    """Spell a layer's shape as transformers 4 did."""
    return {
        "model_type": layer.family,
        "hidden_act": "silu",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "max_position_embeddings": layer.max_positions,
        "num_attention_heads": layer.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_size,
        "rms_norm_eps": layer.norm_eps,
        "rope_theta": layer.rope.theta,
        "attention_bias": layer.qkv_bias,
        "tie_word_embeddings": False,
        "vocab_size": layer.vocab_size,
        "bos_token_id": layer.bos_token_id,
        "eos_token_id": layer.eos_token_ids[0],
        "use_cache": True,
    }


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a folder of config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def eagle1_original(folder: Path, head: Head) -> Path:
    """Write yuhuili/EAGLE-*: no norm at the layer's input, none after it."""
    config = {"architectures": ["LlamaForCausalLM"], **layer_fields(_layer(head))}
    config |= {"bias": head.config.fc_bias}
    return write(folder, config, eagle_tensors(head, "layers.0."))


def eagle1_speculators(folder: Path, head: Head) -> Path:
    """Write what speculators 0.2 converted EAGLE-1 heads to."""
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "speculators_version": "0.2.0",
        "layernorms": False,
        "fusion_bias": head.config.fc_bias,
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer_fields(_layer(head)),
        "speculators_config": _speculators("eagle"),
    }
    tensors = eagle_tensors(head, "transformer.")
    renamed = {name.replace("fc.", "fusion_fc."): each for name, each in tensors.items()}
    return write(folder, config, renamed)


def eagle3_original(folder: Path, head: Head) -> Path:
    """Write yuhuili/EAGLE3-*: one `midlayer`, and no word about the target's layers."""
    config = {"architectures": ["LlamaForCausalLM"], **layer_fields(_layer(head))}
    config |= {"draft_vocab_size": head.config.draft_vocab_size}
    return write(folder, config, eagle_tensors(head, "midlayer."))


def eagle3_specforge(folder: Path, head: Head) -> Path:
    """Write what SpecForge does: layers in `eagle_config`, as SGLang counts them."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], **layer_fields(_layer(head))}
    config |= {
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": head.config.target_hidden_size,
        "fc_norm": head.config.norm_before_fc == "each",
        "norm_output": head.config.norm_output,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [each - 1 for each in head.config.feature_layers],
        },
    }
    return write(folder, config, eagle_tensors(head, "midlayer."))


def eagle3_vllm(folder: Path, head: Head) -> Path:
    """Write a flat configuration with vLLM's names: `layers.0.` and layers at the top level."""
    config = {"architectures": ["Eagle3LlamaForCausalLM"], **layer_fields(_layer(head))}
    config |= {
        "draft_vocab_size": head.config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(head.config.feature_layers),
        "norm_before_residual": head.config.norm_before_residual,
        "norm_before_fc": head.config.norm_before_fc == "one",
    }
    tensors = eagle_tensors(head, "layers.0.")
    inner = {k: v for k, v in tensors.items() if k not in ("d2t", "t2d", "lm_head.weight")}
    outer = {k: v for k, v in tensors.items() if k not in inner}
    return write(folder, config, {f"model.{k}": v for k, v in inner.items()} | outer)


def eagle3_speculators(folder: Path, head: Head) -> Path:
    """Write what speculators trains; RoPE as transformers 5 spells it."""
    layer = layer_fields(_layer(head))
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.7.0",
        "draft_vocab_size": head.config.draft_vocab_size,
        "norm_before_residual": head.config.norm_before_residual,
        "norm_before_fc": head.config.norm_before_fc == "one",
        "fc_norm": head.config.norm_before_fc == "each",
        "norm_output": head.config.norm_output,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(head.config.feature_layers),
        "embed_requires_grad": False,
        "transformer_layer_config": layer,
        "speculators_config": _speculators("eagle3"),
    }
    return write(folder, config, eagle_tensors(head, "layers.0."))


def medusa_original(folder: Path, head: Head) -> Path:
    """Write FasterDecoding/medusa-*; without projections it is their first, legacy version."""
    config = {
        "medusa_num_heads": _medusa(head).num_heads,
        "medusa_num_layers": _medusa(head).num_blocks,
        "base_model_name_or_path": VERIFIER,
        "version": "2",
    }
    return write(folder, config, medusa_tensors(head))


def medusa_tensors(head: Head) -> dict[str, Tensor]:
    """Name the tensors of Medusa heads as their authors do."""
    tensors = {}
    for name, weight in head.weights.items():
        _, index, what, *rest = name.split(".")
        if what == "blocks":
            tensors[f"{index}.{rest[0]}.linear.{rest[1]}"] = weight.clone()
        else:
            tensors[f"{index}.{_medusa(head).num_blocks}.weight"] = weight.clone()
    return tensors


def medusa_vllm(folder: Path, head: Head) -> Path:
    """Write vLLM's renaming, with `token_map` for a draft vocabulary."""
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": head.config.hidden_size,
        "vocab_size": head.config.vocab_size,
        "truncated_vocab_size": head.config.draft_vocab_size,
        "num_heads": _medusa(head).num_heads,
        "num_hidden_layers": _medusa(head).num_blocks,
        "medusa_fc_bias": _medusa(head).block_bias,
        "original_lm_head": _medusa(head).shared_head,
    }
    tensors = {}
    for name, weight in head.weights.items():
        renamed = name.removeprefix("heads.")
        if renamed == "out.weight":
            tensors["lm_head.weight"] = weight.clone()
        elif renamed.endswith("out.weight"):
            tensors[f"lm_heads.{renamed.split('.')[0]}.weight"] = weight.clone()
        else:
            index, _, block, kind = renamed.split(".")
            tensors[f"blocks.{index}.layers.{block}.{kind}"] = weight.clone()
    if head.draft_ids is not None:
        tensors["token_map"] = head.draft_ids.clone()
    return write(folder, config, tensors)


LAYOUTS: dict[str, dict[str, Callable[[Path, Head], Path]]] = {
    "eagle1": {"original": eagle1_original, "speculators": eagle1_speculators},
    "eagle3": {
        "original": eagle3_original,
        "specforge": eagle3_specforge,
        "vllm": eagle3_vllm,
        "speculators": eagle3_speculators,
    },
    "medusa": {"original": medusa_original, "vllm": medusa_vllm},
}


def edit_config(folder: Path, *, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    """Change fields of config.json at its top level."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in remove}))
    return folder


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change the tensors in place: `change` takes them by name."""
    path = folder / "model.safetensors"
    tensors = {name: each.clone() for name, each in load_file(path).items()}
    change(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, path)
    return folder


def _speculators(algorithm: str) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": 5,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": VERIFIER},
    }


def _layer(head: Head) -> ModelConfig:
    assert isinstance(head.config, EagleConfig)
    return head.config.layer


def _medusa(head: Head) -> MedusaConfig:
    assert isinstance(head.config, MedusaConfig)
    return head.config
