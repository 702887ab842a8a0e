"""What a head's configuration says around the head: whose it is, and how long drafts should be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .source import HeadSource

__all__ = ["Provenance", "read_provenance"]


@dataclass(frozen=True, slots=True)
class Provenance:
    """Two hints that nothing depends on."""

    verifier: str | None
    num_speculative_tokens: int | None


def read_provenance(source: HeadSource) -> Provenance:
    """Read the hints; what has another form than expected counts as not said."""
    config = source.config
    inner = _mapping(config.get("speculators_config"))
    verifier = _mapping(inner.get("verifier")).get("name_or_path")
    methods = inner.get("proposal_methods")
    first = _mapping(methods[0] if isinstance(methods, list) and methods else None)
    count = first.get("speculative_tokens") or config.get("num_speculative_tokens")
    named = verifier or config.get("base_model_name_or_path")
    return Provenance(
        named if isinstance(named, str) and named else None,
        count if type(count) is int and count > 0 else None,
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
