"""Weights of a Llama-shaped Hugging Face folder as one GGUF file, for llama.cpp.

Values stay as they are: matrices in the format asked for, norms in float32, nothing quantised.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType, TokenType
from safetensors import safe_open
from torch import Tensor

__all__ = ["write_gguf"]

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """Write `folder` to `path` with matrices in "bfloat16" or "float32"; whole or not at all."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{folder}: a {config['model_type']} model; only llama is converted here")
    if config.get("rope_scaling"):
        raise ValueError(f"{folder}: scaled rotary positions are not converted here")
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    _add_shape(writer, config)
    _add_tokenizer(writer, folder, config)
    writer.add_file_type(
        gguf.LlamaFileType.MOSTLY_BF16 if dtype == "bfloat16" else gguf.LlamaFileType.ALL_F32
    )
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                target = gguf_name(name)
                tensor = tensors.get_tensor(name)
                part = target.split(".")[-2]
                if part in heads:
                    tensor = permute(tensor, heads[part])
                _add_tensor(writer, target, tensor, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(path)


def gguf_name(name: str) -> str:
    """Translate: model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, number, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{number}.{LAYER_NAMES[part]}.{kind}"


def permute(weight: Tensor, num_heads: int) -> Tensor:  # [H*D, E] -> [H*D, E]
    """Order rows for rotation in neighbouring pairs: row i and D/2 + i become 2i and 2i + 1."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])  # [H, 2, D/2, E]
    return halves.transpose(1, 2).reshape(weight.shape)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, dtype: str) -> None:
    if dtype == "bfloat16" and tensor.dim() == 2:
        bits: np.ndarray[Any, Any] = tensor.bfloat16().contiguous().view(torch.uint16).numpy()
        writer.add_tensor(name, bits.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.float().contiguous().numpy())


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(head_size)
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Say enough of a byte-level BPE for the server to load; prompts come as token ids."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    kinds = dict.fromkeys(names, TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        names[added["id"]] = added["content"]
        kinds[added["id"]] = TokenType.CONTROL
    numbers = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([names.get(number, f"[unused{number}]") for number in numbers])
    writer.add_token_types([kinds.get(number, TokenType.UNUSED) for number in numbers])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    eos = config["eos_token_id"]
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    writer.add_add_bos_token(False)
