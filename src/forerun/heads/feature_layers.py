"""Which of the target's layers an EAGLE-3 head reads, from the two spellings that files use.

Id L means the residual stream after L layers: so vLLM and speculators count, at the top level of
config.json. SGLang and SpecForge write one less, and only inside `eagle_config`:

    "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28], ...}

Wrong layers do not fail, they cost nearly all acceptance: what contradicts itself is said aloud.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelFileError, UnsupportedModel

__all__ = ["IDS", "default_layers", "nested_ids", "read_feature_layers"]

IDS = "eagle_aux_hidden_state_layer_ids"


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Say which layers are read where the files name none."""
    return (2, num_layers // 2, num_layers - 3)


def nested_ids(layers: tuple[int, ...]) -> list[int]:
    """Spell layers as `eagle_config` holds them."""
    return [layer - 1 for layer in layers]


def read_feature_layers(
    config: Mapping[str, Any], num_layers: int, where: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Read the layers of a target with `num_layers`, and what there is to say about them.

    Raises:
        ModelFileError: what stands there are no layer ids.
        UnsupportedModel: a layer that the target does not have, or a head that reads none.
    """
    eagle = config.get("eagle_config")
    nested = eagle if isinstance(eagle, Mapping) else {}
    if nested.get("use_aux_hidden_state") is False or config.get("use_aux_hidden_state") is False:
        raise UnsupportedModel(
            f"{where}: use_aux_hidden_state=false, an EAGLE-3 head without intermediate states; "
            "supported: heads that read them"
        )
    top = _ids(config.get(IDS), where)
    inner = _ids(nested.get(IDS), f"{where}: eagle_config")
    shifted = None if inner is None else tuple(each + 1 for each in inner)
    notes: tuple[str, ...] = ()
    if top is not None and shifted is not None and top != shifted:
        notes = (
            f"layer ids contradict each other: {list(top)} at the top level, {list(inner or ())} "
            f"in eagle_config, which means {list(shifted)}; {list(top)} was taken",
        )
    layers = top if top is not None else shifted
    if layers is None:
        layers = default_layers(num_layers)
        way_out = f"; the files name none, so these are the default: give {IDS} in config.json"
    else:
        way_out = "; the head belongs to another target"
    beyond = [each for each in layers if not 0 <= each <= num_layers]
    if beyond:
        raise UnsupportedModel(
            f"{where}: the head reads the target after layers {list(layers)}, the target has "
            f"{num_layers} layers{way_out}"
        )
    return layers, notes


def _ids(value: Any, where: str) -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise ModelFileError(f"{where}: {IDS}={value!r}; expected a list of layer numbers")
    return tuple(value)
