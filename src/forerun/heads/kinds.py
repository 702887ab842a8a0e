"""Which kind of head a checkpoint holds: its tensors decide, its configuration can only refuse.

Architectures are named after the target as often as after the head, so that `LlamaForCausalLM` may
be an EAGLE-1 or an EAGLE-3 head. What is known by name and not done here is refused by that name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from ..errors import UnsupportedModel
from .source import HeadSource, some

__all__ = ["Kind", "find_kind", "plain_name"]

_SUPPORTED = "supported: Medusa, EAGLE-1, EAGLE-2, EAGLE-3"
_SPECULATORS = ("eagle", "eagle3", "medusa")
# What a type, an algorithm or an architecture may be called, in lower case.
_OTHERS = {
    "dflash": "DFlash",
    "dspark": "DSpark",
    "peagle": "P-EAGLE",
    "mlp_speculator": "MLP speculator",
    "mlpspeculator": "MLP speculator",
    "mtp": "MTP",
    "nextn": "MTP",
    "hydra": "Hydra",
}
_OTHER_FIELDS = {
    "dflash_config": "DFlash",
    "mask_token_id": "P-EAGLE or DFlash",
    "parallel_drafting": "P-EAGLE",
    "n_predict": "MLP speculator",
}
_OTHER_TENSORS = {
    "mask_hidden": "P-EAGLE",
    "mask_embedding": "DFlash",
    "markov_head.": "DSpark",
    "speculator.": "MLP speculator",
    "mtp.": "MTP",
}
_PREFIXES = ("model.", "draft_model.", "medusa_heads.", "medusa_head.")
_MEDUSA = re.compile(r"\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\.\d+\.weight")


class Kind(Enum):
    """A kind of head that is read here."""

    MEDUSA = "Medusa"
    EAGLE1 = "EAGLE-1"
    EAGLE3 = "EAGLE-3"


def plain_name(name: str) -> str:
    """Drop what a training program put before a tensor's own name."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def find_kind(source: HeadSource) -> Kind:
    """Say what kind of head this is.

    Raises:
        UnsupportedModel: another kind, or none that is known.
    """
    _refuse_others(source)
    names = {plain_name(name) for name in source.names}
    if any(_MEDUSA.fullmatch(name) for name in names):
        return Kind.MEDUSA
    if names & {"fc.weight", "fusion_fc.weight"}:
        third = any(name.startswith("midlayer.") or "hidden_norm." in name for name in names)
        named = any("eagle3" in each for each in _declared(source.config))
        return Kind.EAGLE3 if third or named else Kind.EAGLE1
    raise UnsupportedModel(
        f"{source.where}: no draft head that is known here, by its tensors ({some(names)}); "
        f"{_SUPPORTED}"
    )


def _refuse_others(source: HeadSource) -> None:
    config = source.config
    declared = list(_declared(config))
    found = [kind for word, kind in _OTHERS.items() if any(word in each for each in declared)]
    found += [kind for field, kind in _OTHER_FIELDS.items() if config.get(field)]
    names = [plain_name(name) for name in source.names]
    found += [
        kind
        for start, kind in _OTHER_TENSORS.items()
        if any(name.startswith(start) for name in names)
    ]
    if found:
        raise UnsupportedModel(f"{source.where}: a {found[0]} head; {_SUPPORTED}")
    if "speculators_model_type" in config or "speculators_config" in config:
        said = [config.get("speculators_model_type"), _algorithm(config)]
        if not any(each in _SPECULATORS for each in said):
            named = next((each for each in said if each), None)
            raise UnsupportedModel(
                f"{source.where}: a speculators head of type {named!r}; {_SUPPORTED}"
            )


def _algorithm(config: Mapping[str, Any]) -> Any:
    inner = config.get("speculators_config")
    return inner.get("algorithm") if isinstance(inner, Mapping) else None


def _declared(config: Mapping[str, Any]) -> Iterator[str]:
    """List in lower case what the configuration calls the head."""
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    said = [config.get("speculators_model_type"), _algorithm(config), config.get("model_type")]
    for each in [*said, *listed]:
        if isinstance(each, str):
            yield each.lower()
