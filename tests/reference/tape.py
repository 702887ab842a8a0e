"""A stand-in for a CUDA graph that runs anywhere: the operations of one run, played again.

As a graph does, it repeats what was done to which memory and decides nothing anew: a number that
the host read or computed while it was recorded stays what it was then. An operation that hands a
number of a tensor to the host, or whose result's shape depends on one, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# What makes the host wait for a device.
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "unique",
    "_unique2",
    "is_nonzero",
}


class Tape(TorchDispatchMode):
    """Records operations; `play` does them again and gives what the last run gave."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        masks = name.startswith("index") and any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1:2])
        )  # how many there are is asked of the device
        waits = masks or name in WAITS
        assert not waits, f"{name} makes the host wait"
        result = function(*args, **(kwargs or {}))
        self.records.append((function, args, kwargs or {}, result))
        return result

    def play(self, wanted: Tensor) -> Tensor:
        made: dict[int, Tensor] = {}

        def now(leaf: Any) -> Any:
            return made.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

        for function, args, kwargs, result in self.records:
            again = function(*tree_map(now, args), **tree_map(now, kwargs))
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor):
                    made[id(old)] = new
        return now(wanted)


def record(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Capture a run as `GraphedDecoder` wants it captured."""
    tape = Tape()
    with tape:
        result = run()

    @torch.inference_mode()
    def play() -> Tensor:
        return tape.play(result)

    return play
