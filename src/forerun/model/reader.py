"""A model's weights, read into place by name and shape, refused where they do not fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ModelFileError
from .weights import WeightSource

__all__ = ["WeightReader"]


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Read weights into place. Every buffer starts as NaN, so that a gap cannot pass."""

    source: WeightSource
    device: torch.device
    dtype: torch.dtype

    def read(self, name: str, *shape: int) -> Tensor:
        """Read one weight.

        Raises:
            ModelFileError: it is missing, has another shape, or holds NaN or infinity.
        """
        return self._gather({name: shape[0]}, shape[1:])

    def stack(
        self, parts: dict[str, int], num_inputs: int, *, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Read linear layers that share their input as one: weight [sum, inputs], bias [sum].

        `parts` counts each layer's outputs by name. Raises what `read` does.
        """
        weight = self._gather(_suffixed(parts, ".weight"), (num_inputs,))
        return weight, self.stack_bias(parts) if bias else None

    def stack_bias(self, parts: dict[str, int]) -> Tensor:
        """Read the biases [sum] of linear layers that share their input; raises as `read` does."""
        return self._gather(_suffixed(parts, ".bias"), ())

    def _gather(self, parts: dict[str, int], inner: tuple[int, ...]) -> Tensor:
        target = torch.full(
            (sum(parts.values()), *inner), torch.nan, dtype=self.dtype, device=self.device
        )
        places: tuple[Tensor, ...] = target.split(list(parts.values()))
        for name, place in zip(parts, places, strict=True):
            if name not in self.source.names:
                raise ModelFileError(f"weight {name!r} is missing")
            weight = self.source.read(name)
            if weight.shape != place.shape:
                raise ModelFileError(
                    f"weight {name!r} has shape {list(weight.shape)}, expected {list(place.shape)}"
                )
            place.copy_(weight)
        # The extremes of a tensor that holds NaN are NaN: a twentieth of what `isfinite` costs.
        if not all(torch.isfinite(extreme) for extreme in target.aminmax()):
            raise ModelFileError(
                f"weights {', '.join(parts)} hold NaN or infinity as {self.dtype}; the file is "
                "damaged, or the format too narrow: try dtype='float32'"
            )
        return target


def _suffixed(parts: dict[str, int], suffix: str) -> dict[str, int]:
    return {name + suffix: rows for name, rows in parts.items()}
