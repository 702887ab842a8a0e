"""What a decoder's shape is: the numbers that decide its maths, read from a configuration.

Four families share one layout (llama, mistral, qwen2, qwen3). What would change the maths and is
not done here is refused by name. Nothing in this file reads a file or holds a weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache.kv_cache import CacheShape
from ..errors import ModelFileError, UnsupportedModel
from .fields import Fields

__all__ = [
    "FAMILIES",
    "LinearScaling",
    "Llama3Scaling",
    "ModelConfig",
    "RopeConfig",
    "expected_shapes",
    "rope_frequencies",
]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_DEFAULT_THETA = 10_000.0
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every rotary frequency divided by one factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by a factor, high ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ModelFileError(
                f"rope scaling llama3: high_freq_factor={self.high_freq_factor} must lie above "
                f"low_freq_factor={self.low_freq_factor}"
            )


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Which rotary frequencies positions are turned by."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | None = None
    freq_factors: tuple[float, ...] | None = None  # [D/2] divisors, as a GGUF file spells llama3


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder and everything its maths depends on but its weights."""

    family: str  # one of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    rope: RopeConfig
    max_positions: int  # what the model was trained for
    tie_embeddings: bool  # the output projection is the embedding table
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool  # an RMS norm of each query and key head, before the rotation
    sliding_windows: tuple[int | None, ...]  # per layer; position i sees j when i - j < window
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ModelFileError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ModelFileError(f"head_size={self.head_size} is odd; rotation needs pairs")
        if len(self.sliding_windows) != self.num_layers:
            raise ModelFileError(
                f"{len(self.sliding_windows)} layer types for {self.num_layers} layers"
            )
        factors = self.rope.freq_factors
        if factors is not None and len(factors) != self.head_size // 2:
            raise ModelFileError(
                f"{len(factors)} rotary factors, expected head_size/2 = {self.head_size // 2}"
            )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read a Hugging Face `config.json` (and `generation_config.json` for the end tokens).

        Raises:
            UnsupportedModel: a field asks for maths that is not done here.
            ModelFileError: a required field is missing or has the wrong type.
        """
        fields = Fields(config, "config.json")
        family = fields.text("model_type")
        if family not in FAMILIES:
            raise UnsupportedModel(f"model_type={family!r}; supported: {', '.join(FAMILIES)}")
        _refuse_other_maths(config, family)
        num_layers = fields.integer("num_hidden_layers")
        hidden_size = fields.integer("hidden_size")
        num_heads = max(1, fields.integer("num_attention_heads"))
        max_positions = fields.integer("max_position_embeddings")
        attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias", False)
        default_head_size = 128 if family == "qwen3" else hidden_size // num_heads
        # null, and in llama's oldest files absence, mean one key head for each query head.
        no_groups = family == "llama" or fields.has("num_key_value_heads")
        default_kv_heads = num_heads if no_groups else None
        return cls(
            family=family,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", default_kv_heads),
            head_size=fields.integer("head_dim", default_head_size),
            norm_eps=fields.number("rms_norm_eps"),
            rope=_read_rope(config, max_positions),
            max_positions=max_positions,
            tie_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=attention_bias,
            qk_norm=family == "qwen3",
            sliding_windows=_read_windows(fields, family, num_layers),
            bos_token_id=_first_id(config, generation, "bos_token_id"),
            eos_token_ids=_all_ids(config, generation, "eos_token_id"),
        )

    @property
    def num_parameters(self) -> int:
        """Count the weights; a tied table counts once."""
        return sum(math.prod(shape) for shape in expected_shapes(self).values())

    def cache_shape(self, block_size: int, dtype: torch.dtype) -> CacheShape:
        """Say what a cache for this model holds."""
        return CacheShape(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            block_size=block_size,
            dtype=dtype,
        )

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Say what one position costs in the cache: keys and values of every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * element_bytes


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "max_positions",
)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name every tensor that a model of this shape has, as Hugging Face names them."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_size
    kv_size = config.num_kv_heads * config.head_size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if config.qkv_bias:
        layer["self_attn.q_proj.bias"] = (q_size,)
        layer["self_attn.k_proj.bias"] = (kv_size,)
        layer["self_attn.v_proj.bias"] = (kv_size,)
    if config.o_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = (config.head_size,)
        layer["self_attn.k_norm.weight"] = (config.head_size,)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def rope_frequencies(config: ModelConfig) -> Tensor:  # -> [D/2] float32
    """Compute the inverse rotary frequencies, with the same roundings as transformers."""
    rope, size = config.rope, config.head_size
    exponents = torch.arange(0, size, 2, dtype=torch.int64).to(torch.float32) / size  # [D/2]
    frequencies = 1.0 / (rope.theta**exponents)
    if isinstance(rope.scaling, LinearScaling):
        frequencies = frequencies / rope.scaling.factor
    elif isinstance(rope.scaling, Llama3Scaling):
        frequencies = _scale_llama3(frequencies, rope.scaling)
    if rope.freq_factors is not None:
        frequencies = frequencies / torch.tensor(rope.freq_factors, dtype=torch.float32)
    return frequencies


def _scale_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:  # [D/2] -> [D/2]
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    is_long = wavelengths > scaling.original_max_positions / low
    is_short = wavelengths < scaling.original_max_positions / high
    scaled = torch.where(is_long, frequencies / scaling.factor, frequencies)
    smooth = (scaling.original_max_positions / wavelengths - low) / (high - low)
    blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    return torch.where(~is_long & ~is_short, blended, scaled)


def _refuse_other_maths(config: Mapping[str, Any], family: str) -> None:
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act={activation!r}; supported: silu")
    if config.get("quantization_config"):
        found = config["quantization_config"]
        method = found.get("quant_method") if isinstance(found, Mapping) else found
        raise UnsupportedModel(
            f"quantization_config with quant_method={method!r}; supported: unquantised "
            "safetensors (F32, F16, BF16), or a .gguf file"
        )
    if config.get("mlp_bias"):
        raise UnsupportedModel(f"mlp_bias={config['mlp_bias']!r}; supported: false")
    if family in ("mistral", "qwen2") and config.get("attention_bias") not in (
        None,
        family == "qwen2",
    ):
        raise UnsupportedModel(
            f"attention_bias={config['attention_bias']!r} for {family}; "
            f"supported: {str(family == 'qwen2').lower()}"
        )
    if config.get("is_encoder_decoder") or config.get("add_cross_attention"):
        raise UnsupportedModel("an encoder-decoder model; supported: decoders")


def _read_rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    # transformers 5 writes one object, rope_parameters; before it, rope_theta and rope_scaling.
    parameters: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ModelFileError(f"config.json: {key}={value!r}; expected an object")
        if any(isinstance(each, Mapping) for each in value.values()):
            raise UnsupportedModel(f"{key} per layer type; supported: one for all layers")
        parameters |= value
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = config.get("rope_theta")
    fields = Fields(parameters, "config.json: rope_parameters")
    theta = fields.number("rope_theta", _DEFAULT_THETA)
    rotated = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotated not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor={rotated!r}; supported: 1.0")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, LinearScaling(fields.number("factor")))
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_max_positions=fields.integer(
                "original_max_position_embeddings", max_positions
            ),
        )
        return RopeConfig(theta, scaling)
    raise UnsupportedModel(f"rope_type={kind!r}; supported: default, linear, llama3")


def _read_windows(fields: Fields, family: str, num_layers: int) -> tuple[int | None, ...]:
    if family == "llama":
        return (None,) * num_layers
    if family == "mistral":
        # A file without the key means the first Mistral's window, as transformers reads it.
        absent = not fields.has("sliding_window")
        stated = absent or fields.raw("sliding_window") is not None
        return (fields.integer("sliding_window", 4096) if stated else None,) * num_layers
    if not fields.flag("use_sliding_window", False) or (
        fields.has("sliding_window") and fields.raw("sliding_window") is None
    ):
        return (None,) * num_layers
    window = fields.integer("sliding_window", 4096)
    types = fields.raw("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 28)
        return tuple(window if index >= first else None for index in range(num_layers))
    if not isinstance(types, Sequence) or isinstance(types, str):
        raise ModelFileError(f"config.json: layer_types={types!r}; expected a list")
    for each in types:
        if each not in _LAYER_TYPES:
            raise UnsupportedModel(f"layer_types: {each!r}; supported: {', '.join(_LAYER_TYPES)}")
    return tuple(window if each == "sliding_attention" else None for each in types)


def _all_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None, key: str
) -> tuple[int, ...]:
    found: list[int] = []
    for source in (generation or {}, config):
        value = source.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for each in values:
            if isinstance(each, bool) or not isinstance(each, int):
                raise ModelFileError(f"{key}={value!r}; expected token ids")
            if each not in found:
                found.append(each)
    return tuple(found)


def _first_id(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None, key: str
) -> int | None:
    # The model's own file comes first here; _all_ids lists generation's first.
    ids = _all_ids(generation or {}, config, key)
    return ids[0] if ids else None
