"""Output that must have a form: constraints compiled, and the tokens that may come next."""

from __future__ import annotations

from .compiler import GrammarCompiler
from .limits import GrammarLimits
from .masks import unpack_masks
from .state import Grammar, GrammarState

__all__ = ["Grammar", "GrammarCompiler", "GrammarLimits", "GrammarState", "unpack_masks"]
