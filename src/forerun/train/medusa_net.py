"""Medusa heads that can learn: residual blocks over the target's final state (2401.10774, 2.1)."""

from __future__ import annotations

from torch import Tensor, empty, nn
from torch.nn import functional

from ..heads.config import MedusaConfig, expected_shapes
from .eagle_net import Guess
from .examples import Batch
from .naming import put

__all__ = ["MedusaNet"]


class MedusaNet(nn.Module):
    """Weights by the names of `Head.weights`; those that are the target's own do not learn."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        for name, shape in expected_shapes(config).items():
            put(self, name, nn.Parameter(empty(shape)))
        if config.own_head and config.shared_head:
            self.get_parameter("out.weight").requires_grad_(False)

    @property
    def num_guesses(self) -> int:
        return self.config.num_heads

    def forward(self, batch: Batch, num_guesses: int, noise: Tensor | None) -> list[Guess]:
        """Guess every look's label by each head, head i from the state of i looks further back.

        There is nothing here that noise would help.
        """
        guesses = []
        for index in range(min(num_guesses, self.config.num_heads)):
            y = batch.finals
            for block in range(self.config.num_blocks):
                name = f"heads.{index}.blocks.{block}"
                y = y + functional.silu(self._linear(name, y))
            # Row n is for the label of look n + index.
            guesses.append(Guess(index, functional.pad(y, (0, 0, index, 0))[: len(y)], None))
        return guesses

    def _linear(self, name: str, x: Tensor) -> Tensor:
        module = self.get_submodule(name)
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None, "every linear layer has one"
        return functional.linear(x, weight, bias)
