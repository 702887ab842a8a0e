"""Write a model as a folder in Hugging Face layout, durably, and convert a GGUF file into one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import UnsupportedModel
from .arch import Llama3Scaling, ModelConfig, RopeConfig
from .loader import ModelFiles, open_model
from .tokenizer import TokenizerSpec
from .weights import WeightSource

__all__ = ["convert_gguf", "save_model", "sync_folder", "sync_path", "to_hf"]

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def convert_gguf(
    source: Path,
    folder: Path,
    dtype: torch.dtype,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Turn a `.gguf` file into a folder with weights of `dtype`; tells tensors done and total."""
    model = open_model(source)
    try:
        save_model(
            folder,
            to_hf(model.config, dtype),
            _cast(model.weights, dtype, report),
            model.tokenizer.tokenizer.to_str(),
            _tokenizer_config(model),
            _generation_config(model.config, model.tokenizer),
        )
    finally:
        model.weights.close()


def save_model(
    folder: Path,
    config: Mapping[str, Any],
    tensors: dict[str, Tensor],
    tokenizer_json: str,
    tokenizer_config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
) -> None:
    """Write a model's five files into `folder`, which exists, and flush them to the disk."""
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", generation_config)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # The library writes for the owner alone; a model is as public as the files beside it.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flush a folder's files and then the folder itself, so that a rename publishes them whole."""
    for path in [*sorted(folder.iterdir()), folder]:
        sync_path(path)


def sync_path(path: Path) -> None:
    """Flush one file, or one folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_hf(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Spell a configuration as `config.json`; what cannot be spelt there is refused."""
    windows = set(config.sliding_windows)
    if windows != {None} and (config.family != "mistral" or len(windows) > 1):
        raise UnsupportedModel(f"sliding windows of {config.family} cannot be written")
    written: dict[str, Any] = {
        "architectures": [_CLASSES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.family in ("llama", "qwen3"):
        if config.qkv_bias != config.o_bias:
            raise UnsupportedModel(f"{config.family} with biases on some projections only")
        written["attention_bias"] = config.qkv_bias
    if config.family == "mistral":
        written["sliding_window"] = config.sliding_windows[0]
    return written


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.freq_factors is not None:
        raise UnsupportedModel("explicit rotary factors cannot be written to config.json")
    if rope.scaling is None:
        return None
    if isinstance(rope.scaling, Llama3Scaling):
        return {
            "rope_type": "llama3",
            "factor": rope.scaling.factor,
            "low_freq_factor": rope.scaling.low_freq_factor,
            "high_freq_factor": rope.scaling.high_freq_factor,
            "original_max_position_embeddings": rope.scaling.original_max_positions,
        }
    return {"rope_type": "linear", "factor": rope.scaling.factor}


def _cast(
    weights: WeightSource, dtype: torch.dtype, report: Callable[[int, int], None]
) -> dict[str, Tensor]:
    tensors = {}
    for index, name in enumerate(sorted(weights.names), start=1):
        tensors[name] = weights.read(name).to(dtype).contiguous()
        report(index, len(weights.names))
    return tensors


def _tokenizer_config(model: ModelFiles) -> dict[str, Any]:
    spec = model.tokenizer
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": spec.bos_token,
        "eos_token": spec.eos_token,
        "pad_token": spec.pad_token,
        "add_bos_token": spec.add_bos,
        "chat_template": spec.chat_template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_positions,
    }
    return {key: value for key, value in told.items() if value is not None}


def _generation_config(config: ModelConfig, spec: TokenizerSpec) -> dict[str, Any]:
    pad = spec.tokenizer.token_to_id(spec.pad_token) if spec.pad_token else None
    told = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": pad,
    }
    return {key: value for key, value in told.items() if value is not None}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
