"""Parameters under dotted names, so that a module's state has the names of a head's weights."""

from __future__ import annotations

from torch import nn

__all__ = ["put"]


def put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter; `layer.q.weight` becomes `weight` of `q` of `layer`."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)
