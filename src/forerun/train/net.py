"""What the training loop asks of a head that learns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from ..heads.config import EagleConfig, HeadConfig
from .eagle_net import EagleNet, Guess
from .examples import Batch
from .medusa_net import MedusaNet

__all__ = ["HeadNet", "make_net"]


class HeadNet(Protocol):
    """A module whose state has the names of a head's weights."""

    def __call__(self, batch: Batch, num_guesses: int, noise: Tensor | None) -> list[Guess]: ...

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]: ...

    def get_parameter(self, target: str) -> Parameter: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


def make_net(config: HeadConfig) -> HeadNet:
    """Make the module of a head, its weights not drawn yet."""
    return EagleNet(config) if isinstance(config, EagleConfig) else MedusaNet(config)
