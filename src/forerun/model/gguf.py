"""A model in one `.gguf` file: its configuration, and its weights under Hugging Face names.

Quantised tensors are dequantised as they are read; nothing here computes on quantised blocks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from ..errors import ModelFileError, UnsupportedModel
from .arch import LinearScaling, ModelConfig, RopeConfig
from .gguf_header import check_header

__all__ = ["SUPPORTED_TYPES", "GgufFile", "GgufWeights", "read_config"]

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS = "rope_freqs.weight"
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_Kind = type | tuple[type, ...]
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufFile:
    """An opened file: metadata by key, tensors by name. The mapping lives until `close`."""

    def __init__(self, path: Path) -> None:
        check_header(path)
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError) as error:
            raise ModelFileError(f"{path}: no readable GGUF file: {error}") from error
        self._reader: gguf.GGUFReader | None = reader
        self.tensors: dict[str, gguf.ReaderTensor] = {each.name: each for each in reader.tensors}

    def get(self, key: str, default: Any = None, kind: _Kind | None = None) -> Any:
        """Read one value as a plain Python value, of `kind` or else of its default's type."""
        assert self._reader is not None, "the file is closed"
        field = self._reader.get_field(key)
        if field is None:
            return default
        try:
            value = field.contents()
        except (ValueError, IndexError) as error:
            raise ModelFileError(f"{self.path}: metadata {key} is unreadable: {error}") from error
        wanted = type(default) if kind is None and default is not None else kind
        if wanted is not None and not isinstance(value, wanted):
            raise ModelFileError(f"{self.path}: metadata {key}={value!r:.80} has the wrong type")
        return value

    def require(self, key: str, kind: _Kind) -> Any:
        value = self.get(key, kind=kind)
        if value is None:
            raise ModelFileError(f"{self.path}: metadata {key!r} is missing")
        return value

    def close(self) -> None:
        self.tensors = {}
        self._reader = None


def read_config(file: GgufFile) -> ModelConfig:
    """Build the configuration from a file's metadata.

    Raises:
        UnsupportedModel: another architecture, or an option that changes its maths.
        ModelFileError: a key or the embedding table is missing.
    """
    family = file.require("general.architecture", str)
    if family not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: general.architecture={family!r}; supported: {', '.join(_ARCHITECTURES)}"
        )
    if file.get(f"{family}.expert_count", 0):
        raise UnsupportedModel(f"{file.path}: {family}.expert_count is set; supported: no experts")
    if "token_embd.weight" not in file.tensors:
        raise ModelFileError(f"{file.path}: tensor 'token_embd.weight' is missing")
    num_layers = file.require(f"{family}.block_count", int)
    num_heads = file.require(f"{family}.attention.head_count", int)
    hidden_size = file.require(f"{family}.embedding_length", int)
    head_size = file.get(f"{family}.attention.key_length", hidden_size // max(1, num_heads))
    _refuse_other_heads(file, family, head_size)
    return ModelConfig(
        family=family,
        vocab_size=int(file.tensors["token_embd.weight"].shape[-1]),
        hidden_size=hidden_size,
        intermediate_size=file.require(f"{family}.feed_forward_length", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(file, family, num_heads),
        head_size=head_size,
        # Stored as float32, meant as the decimal: 9.99999974e-06 is 1e-05.
        norm_eps=_decimal(file.require(f"{family}.attention.layer_norm_rms_epsilon", float)),
        rope=_read_rope(file, family),
        max_positions=file.require(f"{family}.context_length", int),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_windows=(_window(file, family),) * num_layers,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", kind=int),
        eos_token_ids=_end_tokens(file),
    )


def _decimal(value: float) -> float:
    return float(str(np.float32(value)))


def _refuse_other_heads(file: GgufFile, family: str, head_size: int) -> None:
    for key in (f"{family}.attention.value_length", f"{family}.rope.dimension_count"):
        value = file.get(key, head_size)
        if value != head_size:
            raise UnsupportedModel(f"{file.path}: {key}={value}; supported: head size {head_size}")


def _num_kv_heads(file: GgufFile, family: str, num_heads: int) -> int:
    key = f"{family}.attention.head_count_kv"
    value = file.get(key, num_heads, kind=(int, list))
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModel(f"{file.path}: {key} differs between layers")
        value = value[0]
    return int(value)


def _window(file: GgufFile, family: str) -> int | None:
    key = f"{family}.attention.sliding_window"
    value = file.get(key, kind=int)
    if not value:
        return None
    if family != "llama":  # which layers have it is not in the file
        raise UnsupportedModel(f"{file.path}: {key}={value}; supported: none for {family}")
    return int(value)


def _read_rope(file: GgufFile, family: str) -> RopeConfig:
    theta = _decimal(file.get(f"{family}.rope.freq_base", 10_000.0))
    old_factor = file.get(f"{family}.rope.scale_linear", kind=float)
    kind = file.get(f"{family}.rope.scaling.type", "linear" if old_factor else "none")
    if kind not in ("none", "linear"):
        raise UnsupportedModel(
            f"{file.path}: {family}.rope.scaling.type={kind!r}; supported: none, linear"
        )
    linear = None
    if kind == "linear":
        key = f"{family}.rope.scaling.factor"
        linear = LinearScaling(_decimal(old_factor or file.require(key, float)))
    factors = None
    if _ROPE_FACTORS in file.tensors:
        values = _dequantise(file.tensors[_ROPE_FACTORS], file.path)
        factors = tuple(float(each) for each in values)
    return RopeConfig(theta, linear, factors)


def _end_tokens(file: GgufFile) -> tuple[int, ...]:
    # A chat model may end its turns (eot) with another token than its texts (eos).
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [file.get(key, kind=int) for key in keys]
    return tuple(dict.fromkeys(each for each in found if each is not None))


class GgufWeights:
    """The tensors of a `.gguf` file under Hugging Face names, dequantised when read."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._heads = {}
        if config.family == "llama":  # llama.cpp stores only these two reordered
            self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self._tensors = {}
        for name, tensor in file.tensors.items():
            if name == _ROPE_FACTORS:
                continue
            kind = tensor.tensor_type.name
            if kind not in SUPPORTED_TYPES:
                raise UnsupportedModel(
                    f"{file.path}: tensor {name!r} is of type {kind}; "
                    f"supported: {', '.join(SUPPORTED_TYPES)}"
                )
            self._tensors[_hf_name(name, file.path)] = tensor

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        # ggml counts dimensions from the innermost.
        return tuple(int(each) for each in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> str:
        return str(self._tensors[name].tensor_type.name)

    def read(self, name: str) -> Tensor:
        tensor = _dequantise(self._tensors[name], self._file.path)
        part = name.split(".")[-2]
        return unpermute(tensor, self._heads[part]) if part in self._heads else tensor

    def close(self) -> None:
        self._tensors = {}
        self._file.close()


def unpermute(weight: Tensor, num_heads: int) -> Tensor:  # [H*D, ...] -> [H*D, ...]
    """Undo llama.cpp's order of a head's rows; of 4 rows 0, 2, 1, 3 -> 0, 1, 2, 3.

    llama.cpp rotates neighbours (2i, 2i+1), Hugging Face halves (i, i + D/2).
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])  # [H, D/2, 2, ...]
    return pairs.transpose(1, 2).reshape(weight.shape)


def _hf_name(name: str, path: Path) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise UnsupportedModel(f"{path}: tensor {name!r} has no place in a supported model")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _dequantise(tensor: gguf.ReaderTensor, path: Path) -> Tensor:
    kind = tensor.tensor_type
    # The copies let go of the mapping, which is read-only and may be closed.
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return torch.from_numpy(np.array(tensor.data))
    if kind == GGMLQuantizationType.BF16:
        bits = np.array(tensor.data).view(np.int16)
        return torch.from_numpy(bits).view(torch.bfloat16)
    if kind.name not in SUPPORTED_TYPES:
        raise UnsupportedModel(f"{path}: tensor {tensor.name!r} is of type {kind.name}")
    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(tensor.data, kind)))
