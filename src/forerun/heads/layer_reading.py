"""Read the one decoder layer of an EAGLE head as a `ModelConfig`.

Its configuration stands in `transformer_layer_config` (speculators) or at the top level (all
others), and is often a copy of the target's: biases, head norms and the number of layers are
therefore taken from the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ModelFileError, UnsupportedModel
from ..model.arch import ModelConfig
from ..model.fields import Fields
from .eagle_names import EagleNames
from .source import HeadSource

__all__ = ["read_layer"]

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_UNSAID = (None, "eagle", "eagle3", "speculators")
_WINDOW_FIELDS = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")


def read_layer(
    source: HeadSource, names: EagleNames, target: ModelConfig
) -> tuple[ModelConfig, list[str]]:
    """Read the layer's shape, and what there is to say about it.

    Raises:
        ModelFileError: a field is missing or contradicts the tensors.
        UnsupportedModel: a field asks for maths that is not done here.
    """
    inner = source.config.get("transformer_layer_config")
    given: Mapping[str, Any] = inner if isinstance(inner, Mapping) else source.config
    stored = names.stored
    notes: list[str] = []
    declared, has_norms = given.get("model_type"), "layer.q_norm.weight" in stored
    if declared == "qwen3" and not has_norms:
        raise ModelFileError(
            f"{source.where}: model_type='qwen3' has query and key norms, and the files hold none; "
            "if the head was made without them, say model_type='llama' in config.json"
        )
    family = "qwen3" if has_norms else "llama"
    if declared not in (*_LLAMA_LIKE, *_UNSAID):
        notes.append(f"model_type={declared!r} is not known; read as {family}, by its tensors")
    num_layers = given.get("num_hidden_layers")
    if num_layers not in (None, 1):
        if given is inner:  # speculators' own field; elsewhere it may be copied from the target
            raise UnsupportedModel(
                f"{source.where}: {num_layers} decoder layers; supported: heads of one layer"
            )
        notes.append(f"config.json says {num_layers} layers, the files hold 1, which counts")
    fields = {key: value for key, value in given.items() if key not in _WINDOW_FIELDS}
    fields |= {"model_type": family, "num_hidden_layers": 1, "tie_word_embeddings": False}
    fields |= {"attention_bias": False}  # tensors say it better, below
    if fields.get("vocab_size") is None:
        fields["vocab_size"] = target.vocab_size
    if fields.get("head_dim") is None:
        fields["head_dim"] = _head_size(source, names, Fields(given, f"{source.where}: config"))
    layer = replace(
        _shape_of(source, fields),
        qkv_bias="layer.q.bias" in stored or bool(given.get("attention_bias")),
        o_bias="layer.o.bias" in stored,
        sliding_windows=(_read_window(source, given, notes),),
    )
    if layer.max_positions < target.max_positions:
        notes.append(
            f"the head was made for {layer.max_positions} positions, the target for "
            f"{target.max_positions}: drafting stops at position {layer.max_positions}"
        )
    return layer, notes


def _shape_of(source: HeadSource, fields: Mapping[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.from_hf(fields)
    except (ModelFileError, UnsupportedModel) as error:
        raise type(error)(f"{source.where}: the head's layer: {error}") from error


def _head_size(source: HeadSource, names: EagleNames, fields: Fields) -> int | None:
    # Not every file says it, and not every model has hidden_size / num_heads.
    name, num_heads = names.stored.get("layer.q.weight"), fields.integer("num_attention_heads")
    rows = source.shape(name)[0] if name and source.shape(name) else 0
    return rows // num_heads if num_heads > 0 and rows and rows % num_heads == 0 else None


def _read_window(source: HeadSource, given: Mapping[str, Any], notes: list[str]) -> int | None:
    types = given.get("layer_types")
    first = types[0] if isinstance(types, list) and types else None
    if first is None and given.get("use_sliding_window") and given.get("sliding_window"):
        notes.append(
            f"sliding_window={given['sliding_window']} without layer_types: ignored, as others do"
        )
    if first in (None, "full_attention"):
        return None
    if first != "sliding_attention":
        raise UnsupportedModel(
            f"{source.where}: layer type {first!r}; supported: full_attention, sliding_attention"
        )
    return Fields(given, f"{source.where}: config").integer("sliding_window")
