"""Where weights come from: the one interface of safetensors folders and GGUF files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from ..errors import ModelFileError, UnsupportedModel
from .arch import ModelConfig, expected_shapes

__all__ = ["WeightSource", "check_complete"]

_SHOWN = 4  # names in one message


class WeightSource(Protocol):
    """Tensors under Hugging Face names, read one at a time so that no second copy is held."""

    @property
    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """Say how the file stores it: F32, BF16, Q4_K, ..."""
        ...

    def read(self, name: str) -> Tensor:
        """Read a tensor to the CPU, in its stored dtype, or float32 where it was quantised."""
        ...

    def close(self) -> None: ...


def check_complete(source: WeightSource, config: ModelConfig, where: object = "weights") -> None:
    """Raise unless `source` has exactly the tensors that `config` implies.

    Raises:
        ModelFileError: tensors are missing or have another shape.
        UnsupportedModel: tensors that this maths has no place for.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in source.names]
    if missing:
        raise ModelFileError(f"{where}: {len(missing)} tensors are missing: {_some(missing)}")
    wrong = [
        f"{name} is {list(source.shape(name))}, expected {list(shape)}"
        for name, shape in expected.items()
        if tuple(source.shape(name)) != shape
    ]
    if wrong:
        raise ModelFileError(f"{where}: shapes do not fit the configuration: {_some(wrong, '; ')}")
    extra = sorted(name for name in source.names if name not in expected and not _is_idle(name))
    if extra:
        raise UnsupportedModel(
            f"{where}: {len(extra)} tensors that {config.family} has no place for: {_some(extra)}"
        )


def _is_idle(name: str) -> bool:
    # Old files store the rotary frequencies; tied ones may repeat the table as lm_head.
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _some(items: Iterable[str], separator: str = ", ") -> str:
    listed = list(items)
    rest = len(listed) - _SHOWN
    return separator.join(listed[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
