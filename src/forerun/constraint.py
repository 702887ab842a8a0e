"""What a request's output must look like, as data: a JSON schema, a pattern, a choice, a grammar.

How it is enforced is `grammar`'s; this is what crosses from a request to it. Hashable, so that a
compiled form can be kept.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .errors import InvalidParameter

__all__ = ["Constraint"]

KINDS = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint on a whole output, in the words of its kind."""

    kind: str  # json, regex, choice, grammar
    # json: a schema as JSON text; regex: a pattern; choice: a JSON list of strings; grammar: Lark
    source: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidParameter(f"{self.kind!r} is no kind of constraint: {', '.join(KINDS)}")
        if not isinstance(self.source, str):
            raise InvalidParameter(
                f"a {self.kind} constraint is text, not {type(self.source).__name__}"
            )

    @staticmethod
    def json_schema(schema: dict[str, Any] | bool) -> Constraint:
        """Ask for JSON that a schema accepts."""
        return Constraint("json", json.dumps(schema))

    @staticmethod
    def json_object() -> Constraint:
        """Ask for any JSON object."""
        return Constraint.json_schema({"type": "object"})

    @staticmethod
    def choice(choices: list[str]) -> Constraint:
        """Ask for exactly one of some texts."""
        return Constraint("choice", json.dumps(choices))
