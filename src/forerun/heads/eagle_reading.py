"""Read an EAGLE head of any generation: from configuration and tensors to an `EagleConfig`.

What a tensor's presence or shape says outweighs what the configuration says about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelFileError, UnsupportedModel
from ..model.arch import ModelConfig
from .checks import read_weights
from .config import EagleConfig, Head
from .eagle_names import EagleNames, name_tensors
from .feature_layers import read_feature_layers
from .layer_reading import read_layer
from .provenance import read_provenance
from .source import HeadSource
from .vocabulary import check_mask, read_offsets

__all__ = ["read_eagle"]


def read_eagle(source: HeadSource, target: ModelConfig, generation: int) -> Head:
    """Read and check an EAGLE head for `target`; raises what `open_head` does."""
    names = name_tensors(source, generation)
    layer, layer_notes = read_layer(source, names, target)
    _check_target(source, layer, target, generation)
    features, norms, notes = _read_inputs(source, names, target, generation)
    draft_vocab_size = _draft_vocab_size(source, names, target)
    ids = read_offsets(source, names.d2t, draft_vocab_size, target.vocab_size)
    stored = names.stored
    config = EagleConfig(
        generation=generation,
        layer=layer,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        feature_layers=features,
        fc_bias="fc.bias" in stored or (generation == 1 and source.config.get("bias") is True),
        input_norm=generation == 3 or "input_norm.weight" in stored,
        output_norm=generation == 3 or "norm.weight" in stored,
        own_embeddings="embedding.weight" in stored,
        own_head="head.weight" in stored,
        **norms,
    )
    _check_shared(source, config)
    origin = read_provenance(source)
    return Head(
        config=config,
        weights=read_weights(source, config, stored),
        draft_ids=ids,
        verifier=origin.verifier,
        num_speculative_tokens=origin.num_speculative_tokens,
        notes=(*names.notes, *layer_notes, *notes, *check_mask(source, names.t2d, ids)),
    )


def _check_target(
    source: HeadSource, layer: ModelConfig, target: ModelConfig, generation: int
) -> None:
    if layer.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            f"{source.where}: the head is for a vocabulary of {layer.vocab_size} tokens, the "
            f"target has {target.vocab_size}; use the target that the head was trained for"
        )
    # What EAGLE-1 computes takes the place of the target's own hidden state.
    own = layer.hidden_size if generation == 1 else None
    for size in (source.config.get("target_hidden_size"), own):
        if size not in (None, target.hidden_size):
            raise UnsupportedModel(
                f"{source.where}: the head is for a hidden size of {size}, the target has "
                f"{target.hidden_size}; use the target that the head was trained for"
            )


def _read_inputs(
    source: HeadSource, names: EagleNames, target: ModelConfig, generation: int
) -> tuple[tuple[int, ...], dict[str, Any], list[str]]:
    """Read which features go into the head, and the norms on their way."""
    if generation == 1:
        none = {"norm_before_residual": False, "norm_before_fc": "none", "norm_output": False}
        return (), none, []
    config = source.config
    layers, layer_notes = read_feature_layers(config, target.num_layers, source.where)
    notes = list(layer_notes)
    _check_width(source, names, layers, target)
    before_fc = _norm_before_fc(source, names, notes)
    flag = _flag(source, "norm_before_residual")
    if flag is None and "speculators_model_type" in config:
        notes.append(
            "norm_before_residual is missing: speculators takes false, and so it was taken; vLLM "
            "takes true"
        )
    norms = {
        "norm_before_residual": bool(flag),
        "norm_before_fc": before_fc,
        "norm_output": bool(_flag(source, "norm_output")),
    }
    return layers, norms, notes


def _check_width(
    source: HeadSource, names: EagleNames, layers: tuple[int, ...], target: ModelConfig
) -> None:
    shape = source.shape(names.stored["fc.weight"])
    width = shape[1] if len(shape) == 2 else 0
    if width != len(layers) * target.hidden_size:
        raise UnsupportedModel(
            f"{source.where}: fc takes {width} inputs; the layers {list(layers)} of the target "
            f"give {len(layers)} x {target.hidden_size}; the head belongs to another target, or "
            "config.json does not name its layers"
        )


def _norm_before_fc(source: HeadSource, names: EagleNames, notes: list[str]) -> str:
    one = "fc_norm.weight" in names.stored
    each = any(name.startswith("fc_norm.") and name != "fc_norm.weight" for name in names.stored)
    if one and each:
        raise UnsupportedModel(
            f"{source.where}: both input_norm and fc_norm before fc; supported: one of them"
        )
    for key, present in (("norm_before_fc", one), ("fc_norm", each)):
        flag = _flag(source, key)
        if flag is False and present:
            notes.append(f"config.json says {key}=false, the files hold that norm, which counts")
        if flag is True and not present:
            raise ModelFileError(f"{source.where}: {key}=true, and that norm's tensors are missing")
    return "one" if one else "each" if each else "none"


def _flag(source: HeadSource, key: str) -> bool | None:
    """Read a flag from the top level, or from `eagle_config`, where some programs put it."""
    nested = source.config.get("eagle_config")
    for holder in (source.config, nested if isinstance(nested, Mapping) else {}):
        value = holder.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelFileError(f"{source.where}: {key}={value!r}; expected true or false")
        if value is not None:
            return bool(value)
    return None


def _draft_vocab_size(source: HeadSource, names: EagleNames, target: ModelConfig) -> int:
    declared = source.config.get("draft_vocab_size")
    if declared is None and names.d2t is not None:
        declared = source.shape(names.d2t)[0] if source.shape(names.d2t) else 0
    size = target.vocab_size if declared is None else declared
    if type(size) is not int or not 1 <= size <= target.vocab_size:
        raise ModelFileError(
            f"{source.where}: draft_vocab_size={size!r}; expected 1..{target.vocab_size}"
        )
    return size


def _check_shared(source: HeadSource, config: EagleConfig) -> None:
    hidden, theirs = config.layer.hidden_size, config.target_hidden_size
    if hidden == theirs or (config.own_embeddings and config.own_head):
        return
    raise UnsupportedModel(
        f"{source.where}: the head's hidden size is {hidden}, the target's {theirs}, so it cannot "
        "use the target's embeddings or vocabulary projection, and lacks its own"
    )
