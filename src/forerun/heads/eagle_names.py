"""The names of an EAGLE head's tensors: every spelling that is known, and ours.

    original EAGLE-3, SpecForge    midlayer.self_attn.q_proj.weight
    original EAGLE-1, vLLM         layers.0.self_attn.q_proj.weight
    speculators v0.2 (EAGLE-1)     transformer.self_attn.q_proj.weight, fusion_fc.weight
    ours                           layer.q.weight

A tensor that none of them knows is refused: what it would have done is unknown too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ..errors import ModelFileError, UnsupportedModel
from .kinds import plain_name
from .source import HeadSource, some

__all__ = ["LAYER_NAMES", "OUTER_NAMES", "EagleNames", "first_norm", "name_tensors"]

# Ours -> the files', within the layer. The layer's first norm has another meaning by generation.
LAYER_NAMES = {
    **{f"layer.{each}": f"self_attn.{each}_proj" for each in "qkvo"},
    **{f"layer.{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")},
    "layer.q_norm": "self_attn.q_norm",
    "layer.k_norm": "self_attn.k_norm",
    "layer.mlp_norm": "post_attention_layernorm",
    "hidden_norm": "hidden_norm",
}
# Ours -> the files', around the layer.
OUTER_NAMES = {
    "fc": "fc",
    "fc_norm": "input_norm",
    "norm": "norm",
    "head": "lm_head",
    "embedding": "embed_tokens",
}
_LAYER = re.compile(r"(?:midlayer|transformer|layers\.(\d+))\.(.+)")
_ALIASES = {"fusion_fc": "fc", "pre_lm_head_layernorm": "norm"}
_EACH_NORM = re.compile(r"fc_norm\.\d+\.weight")
# Needed in training alone, or computed anew by every reader.
_IDLE = ("verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True, slots=True)
class EagleNames:
    """Where a file has what."""

    stored: dict[str, str]  # our name -> the file's
    d2t: str | None
    t2d: str | None
    notes: tuple[str, ...]


def first_norm(generation: int) -> str:
    """Say what we call the norm that files call the layer's input_layernorm."""
    return "embed_norm" if generation == 3 else "input_norm"


def name_tensors(source: HeadSource, generation: int) -> EagleNames:
    """Find every tensor's place.

    Raises:
        UnsupportedModel: more than one layer, or tensors that have no place here.
        ModelFileError: two tensors of one name that differ.
    """
    _refuse_more_layers(source)
    stored: dict[str, str] = {}
    maps: dict[str, str] = {}
    idle, unknown, notes = [], [], []
    for name in sorted(source.names):
        plain = _plain(name)
        if plain in ("d2t", "t2d"):
            maps[plain] = name
        elif plain in _IDLE or plain.endswith("rotary_emb.inv_freq"):
            idle.append(name)
        elif (ours := _our_name(plain, generation)) is None:
            unknown.append(name)
        elif ours in stored:
            notes.append(_same_twice(source, stored[ours], name))
        else:
            stored[ours] = name
    if unknown:
        raise UnsupportedModel(
            f"{source.where}: {len(unknown)} tensors that an EAGLE-{generation} head has no place "
            f"for: {some(unknown)}"
        )
    if idle:
        notes.append(f"not needed and ignored: {some(idle)}")
    return EagleNames(stored, maps.get("d2t"), maps.get("t2d"), tuple(notes))


def _plain(name: str) -> str:
    plain = plain_name(name)
    return "d2t" if plain == "draft_id_to_target_id" else plain


def _our_name(plain: str, generation: int) -> str | None:
    if generation == 3 and _EACH_NORM.fullmatch(plain):
        return plain
    inner = _LAYER.fullmatch(plain)
    module, _, kind = (inner[2] if inner else plain).rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    module = _ALIASES.get(module, module)
    if inner and module == "input_layernorm":
        return f"{first_norm(generation)}.{kind}"
    names = LAYER_NAMES if inner else OUTER_NAMES
    found = next((ours for ours, theirs in names.items() if theirs == module), None)
    if found is None or (generation != 3 and found in ("fc_norm", "hidden_norm")):
        return None
    # Only these linear layers may have a bias; norms and the vocabulary projection have none.
    if kind == "bias" and found not in ("fc", "layer.q", "layer.k", "layer.v", "layer.o"):
        return None
    return f"{found}.{kind}"


def _refuse_more_layers(source: HeadSource) -> None:
    matches = [_LAYER.fullmatch(_plain(name)) for name in source.names]
    deepest = max((int(each[1]) for each in matches if each and each[1]), default=0)
    if deepest:
        raise UnsupportedModel(
            f"{source.where}: {deepest + 1} decoder layers; supported: heads of one layer"
        )


def _same_twice(source: HeadSource, first: str, second: str) -> str:
    if source.shape(first) != source.shape(second) or not torch.equal(
        source.read(first), source.read(second)
    ):
        raise ModelFileError(
            f"{source.where}: {first} and {second} are one tensor under two names, and differ; "
            "remove the wrong one"
        )
    return f"{second} repeats {first} and was ignored"
