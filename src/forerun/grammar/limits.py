"""How big a constraint may be, and what compiling it may cost: the numbers, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GrammarLimits"]


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds of one constraint, of compiling it, and of what is kept of all."""

    source_bytes: int = 256 * 1024  # of a schema, pattern, list of choices or grammar
    json_depth: int = 64  # braces and brackets in each other; the compiler's own bound is 127
    num_refs: int = 500  # `$ref`s of a schema
    regex_chars: int = 4096  # of a pattern, in a schema too
    num_choices: int = 2000
    compile_s: float = 5.0  # for one constraint; also the longest wait for a free worker
    memory_bytes: int = 512 * 1024**2  # that compiling one constraint may take
    num_workers: int = 2  # processes that try constraints, so constraints tried at a time
    cache_bytes: int = 128 * 1024**2  # of compiled constraints, measured
