"""What every head's tensors must be: there, of the right shape, unquantised and finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import ModelFileError, UnsupportedModel
from .config import HeadConfig, expected_shapes
from .source import HeadSource, some

__all__ = ["check_shapes", "read_weights", "refuse_quantised"]

FLOATS = ("F32", "F16", "BF16")
_SCALES = ("_scale", "_scale_inv", ".scales", ".qweight", ".qzeros", ".weight_packed", ".absmax")


def refuse_quantised(source: HeadSource) -> None:
    """Raise `UnsupportedModel` if the head's weights are quantised."""
    way_out = f"supported: {', '.join(FLOATS)}; use the head's unquantised files"
    for holder in (source.config, source.config.get("transformer_layer_config")):
        found = holder.get("quantization_config") if isinstance(holder, Mapping) else None
        if found:
            method = found.get("quant_method") if isinstance(found, Mapping) else found
            raise UnsupportedModel(
                f"{source.where}: quantised weights (quant_method={method!r}); {way_out}"
            )
    scales = {name for name in source.names if name.endswith(_SCALES)}
    if scales:
        raise UnsupportedModel(f"{source.where}: quantised weights ({some(scales)}); {way_out}")


def check_shapes(
    where: str,
    config: HeadConfig,
    shapes: Mapping[str, tuple[int, ...]],
    called: Mapping[str, str],
) -> dict[str, tuple[int, ...]]:
    """Hold shapes by our names against what `config` implies, and return that.

    `called` says what messages call a tensor that is there: its name in the files.

    Raises:
        ModelFileError: weights are missing, or of another shape.
        UnsupportedModel: weights that have no place.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise ModelFileError(
            f"{where}: {len(missing)} of the head's tensors are missing: {some(missing)}"
        )
    extra = [name for name in shapes if name not in expected]
    if extra:
        raise UnsupportedModel(
            f"{where}: {len(extra)} tensors without those that belong to them: "
            f"{some([called[name] for name in extra])}"
        )
    wrong = [
        f"{called[name]} is {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if tuple(shapes[name]) != shape
    ]
    if wrong:
        raise ModelFileError(f"{where}: shapes do not fit the configuration: {some(wrong, '; ')}")
    return expected


def read_weights(
    source: HeadSource, config: HeadConfig, stored: Mapping[str, str]
) -> dict[str, Tensor]:
    """Read the weights that `config` implies; `stored` maps our names to the files'.

    Raises:
        ModelFileError: weights are missing, of another shape, or hold NaN or infinity.
        UnsupportedModel: weights without a place, or stored in a format that is not read.
    """
    shapes = {ours: source.shape(name) for ours, name in stored.items()}
    expected = check_shapes(source.where, config, shapes, stored)
    return {ours: _read(source, stored[ours]) for ours in expected}


def _read(source: HeadSource, name: str) -> Tensor:
    if source.dtype(name) not in FLOATS:
        raise UnsupportedModel(
            f"{source.where}: {name} is stored as {source.dtype(name)}; supported: "
            f"{', '.join(FLOATS)}"
        )
    weight = source.read(name)
    # The extremes of a tensor that holds NaN are NaN: a twentieth of what `isfinite` costs.
    if not all(torch.isfinite(extreme) for extreme in weight.aminmax()):
        raise ModelFileError(
            f"{source.where}: {name} holds NaN or infinity; the file is damaged, or its training "
            "diverged"
        )
    return weight
