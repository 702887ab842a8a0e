"""From a constraint to the text that the compiler reads; what is too big is refused here.

Everything becomes a grammar in the compiler's dialect of Lark, with one option: a token is legal
whenever some legal text goes on after it. (The compiler's default is to allow only the customary
tokens of a text that is forced; that depends on how it cuts text and makes drafts illegal for
their spelling alone.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from ..constraint import Constraint
from ..errors import InvalidConstraint
from .limits import GrammarLimits

__all__ = ["to_lark"]

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'  # last: a grammar's own options come before
# One space after commas and colons, as models write `{"a": 1, "b": 2}`, and no other white space.
# With a choice there (new lines, indentation) nothing between two values is forced, so nothing of
# it could be drafted; and without a bound small models go on with blank lines and never end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DATA = ("const", "default", "enum", "examples")  # what these hold is no schema


def to_lark(constraint: Constraint, limits: GrammarLimits) -> str:
    """Write a constraint as a grammar.

    Raises:
        InvalidConstraint: it is too big, or wrong where no compiler is needed to see it.
    """
    source = constraint.source
    try:
        size = len(source.encode())
    except UnicodeEncodeError as error:
        raise InvalidConstraint(
            f"character {error.start} of the {constraint.kind} constraint is half of a surrogate "
            "pair, which no text can hold; send valid Unicode"
        ) from error
    if size > limits.source_bytes:
        _too_big(f"a {constraint.kind} constraint of {size} bytes", limits.source_bytes)
    if constraint.kind == "json":
        return f"start: %json {_schema(source, limits)}{_OPTIONS}"
    if constraint.kind == "regex":
        return f"start: /{_regex(source, limits)}/{_OPTIONS}"
    if constraint.kind == "choice":
        return f"start: /{_choices(source, limits)}/{_OPTIONS}"
    return source + _OPTIONS


def _schema(source: str, limits: GrammarLimits) -> str:
    schema = _parse(source, "schema", limits)
    if schema is True:
        schema = {}
    if schema is False:
        raise InvalidConstraint("the schema is false, which no JSON satisfies")
    if not isinstance(schema, dict):
        raise InvalidConstraint(f"a JSON schema is an object or true, not {type(schema).__name__}")
    _check_schema(schema, limits)
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise InvalidConstraint('"x-guidance" of a schema must be an object')
    if not {"whitespace_pattern", "whitespace_flexible"} & options.keys():
        options = {**_SPACING, **options}
    try:
        return json.dumps({**schema, "x-guidance": options}, allow_nan=False)
    except ValueError as error:
        raise InvalidConstraint(f"the schema has a number that JSON cannot hold: {error}") from None


def _parse(source: str, what: str, limits: GrammarLimits) -> Any:
    try:
        return json.loads(source, parse_constant=_refuse_constant)
    except RecursionError:
        _too_big(f"a {what} that is nested more deeply than can be read", limits.json_depth)
    except ValueError as error:  # not JSON, or a whole number of thousands of digits
        raise InvalidConstraint(f"the {what} is not valid JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _check_schema(schema: dict[str, Any], limits: GrammarLimits) -> None:
    num_refs = 0
    for depth, value in _walk(schema, limits.json_depth):
        if depth > limits.json_depth:
            _too_big("a schema nested more deeply", limits.json_depth)
        if not isinstance(value, dict):
            continue
        ref = value.get("$ref")
        if isinstance(ref, str):
            num_refs += 1
            if not ref.startswith("#"):
                raise InvalidConstraint(
                    f'"$ref": {ref[:100]!r} points outside the schema, and nothing is fetched; '
                    'put what it means into "$defs" and refer to "#/$defs/..."'
                )
        patterns = [value.get("pattern")]
        if isinstance(value.get("patternProperties"), dict):
            patterns += value["patternProperties"]
        if isinstance(value.get("x-guidance"), dict):
            patterns += value["x-guidance"].values()
        for pattern in patterns:
            if isinstance(pattern, str):
                _check_regex(pattern, limits)
    if num_refs > limits.num_refs:
        _too_big(f"a schema with {num_refs} references", limits.num_refs)


def _walk(root: object, max_depth: int) -> Iterator[tuple[int, object]]:
    """Yield what a value holds with its depth, to one past the deepest that is allowed."""
    pending: list[tuple[int, object, bool]] = [(1, root, False)]
    while pending:
        depth, value, is_data = pending.pop()
        yield depth, None if is_data else value
        if depth > max_depth:
            continue
        if isinstance(value, dict):
            children = [(each, is_data or key in _DATA) for key, each in value.items()]
        elif isinstance(value, list):
            children = [(each, is_data) for each in value]
        else:
            continue
        pending += [
            (depth + 1, each, data) for each, data in children if isinstance(each, dict | list)
        ]


def _regex(source: str, limits: GrammarLimits) -> str:
    from llguidance import regex_to_lark

    _check_regex(source, limits)
    return regex_to_lark(source, "d")  # \d is 0 to 9, not every script's digits


def _check_regex(pattern: str, limits: GrammarLimits) -> None:
    if len(pattern) > limits.regex_chars:
        _too_big(f"a pattern of {len(pattern)} characters", limits.regex_chars)


def _choices(source: str, limits: GrammarLimits) -> str:
    choices = _parse(source, "list of choices", limits)
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise InvalidConstraint("choices are a list of texts")
    if not choices:
        raise InvalidConstraint("there is no choice to choose from; give at least one text")
    if len(choices) > limits.num_choices:
        _too_big(f"a list of {len(choices)} choices", limits.num_choices)
    return "|".join("".join(map(_literal, choice)) for choice in dict.fromkeys(choices))


def _literal(character: str) -> str:
    if 0xD800 <= ord(character) <= 0xDFFF:
        raise InvalidConstraint(
            f"a choice has U+{ord(character):04X}, half of a surrogate pair, which no text can "
            "hold; send valid Unicode"
        )
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{ord(character):x}}}"


def _too_big(what: str, limit: int) -> NoReturn:
    raise InvalidConstraint(f"{what} is more than is compiled here; the limit is {limit}")
