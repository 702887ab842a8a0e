"""From a request's fields to what the engine is asked: sampling params, constraint, drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..constraint import Constraint
from ..params import SamplingParams
from .failures import Refusal
from .fields import GenerationFields, ResponseFormat, StructuredOutputs
from .keys import ApiKey

__all__ = ["Doors", "constraint_field", "is_constrained", "read_constraint", "read_params"]


@dataclass(frozen=True, slots=True)
class Doors:
    """What of a server's setting decides whether fields make sense."""

    drafter: str  # what the engine's drafter is called
    max_samples: int


def read_params(
    given: GenerationFields,
    doors: Doors,
    key: ApiKey | None,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    constraint: Constraint | None,
    **more: Any,
) -> SamplingParams:
    """Turn fields to params; `more` are fields of the params that only one endpoint has.

    Raises:
        Refusal, InvalidParameter: a value that cannot be obeyed.
    """
    samples = given.n or 1
    if samples > doors.max_samples:
        raise Refusal(
            400,
            f"n={samples} is above {doors.max_samples}, the most answers to one prompt here",
            param="n",
            code="invalid_value",
        )
    plain = {
        "temperature": given.temperature,
        "top_k": given.top_k,
        "top_p": given.top_p,
        "min_p": given.min_p,
        "typical_p": given.typical_p,
        "presence_penalty": given.presence_penalty,
        "frequency_penalty": given.frequency_penalty,
        "repetition_penalty": given.repetition_penalty,
        "logit_bias": given.logit_bias,
        "allowed_token_ids": given.allowed_token_ids,
        "bad_words": given.bad_words,
        "min_tokens": given.min_tokens,
        "seed": _seed(given.seed),
        "stop": given.stop or None,
        "stop_token_ids": given.stop_token_ids,
        "ignore_eos": given.ignore_eos,
        "skip_special_tokens": given.skip_special_tokens,
        "prompt_logprobs": given.prompt_logprobs,
        "priority": given.priority,
        **more,
    }
    options = {name: value for name, value in plain.items() if value is not None}
    return SamplingParams(
        n=samples,
        max_tokens=max_tokens,
        logprobs=logprobs,
        max_draft=_max_draft(given, doors),
        constraint=constraint,
        cache_salt=_salt(given.cache_salt, key),
        **options,
    )


def read_constraint(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> Constraint | None:
    """Read what the answer must look like; at most one way of saying it is taken."""
    asked = [*_of_format(response_format), *_of_structured(structured)]
    if len(asked) > 1:
        raise Refusal(
            400,
            "the answer is constrained in more than one way; send one of response_format and "
            "structured_outputs, with one constraint",
            param="structured_outputs",
            code="invalid_value",
        )
    return asked[0] if asked else None


def is_constrained(given: GenerationFields) -> bool:
    """Say whether something has to be compiled for a request."""
    formatted = given.response_format is not None and given.response_format.type != "text"
    return formatted or given.structured_outputs is not None


def constraint_field(given: GenerationFields) -> str:
    """Name the field that the constraint came in."""
    return "response_format" if given.structured_outputs is None else "structured_outputs"


def _of_format(given: ResponseFormat | None) -> Sequence[Constraint]:
    if given is None or given.type == "text":
        return ()
    if given.type == "json_object":
        return (Constraint.json_object(),)
    schema = None if given.json_schema is None else given.json_schema.schema_
    if schema is None:
        raise Refusal(
            400,
            "response_format.json_schema.schema is missing; a json_schema format needs it",
            param="response_format",
            code="invalid_value",
        )
    return (Constraint.json_schema(schema),)


def _of_structured(given: StructuredOutputs | None) -> Sequence[Constraint]:
    if given is None:
        return ()
    found = []
    if given.json_ is not None:
        as_text = given.json_ if isinstance(given.json_, str) else json.dumps(given.json_)
        found.append(Constraint("json", as_text))
    if given.regex is not None:
        found.append(Constraint("regex", given.regex))
    if given.choice is not None:
        found.append(Constraint.choice(given.choice))
    if given.grammar is not None:
        found.append(Constraint("grammar", given.grammar))
    if not found:
        raise Refusal(
            400,
            "structured_outputs holds no constraint; send one of json, regex, choice, grammar",
            param="structured_outputs",
            code="invalid_value",
        )
    return found


def _max_draft(given: GenerationFields, doors: Doors) -> int | None:
    """How far to draft: None is as the engine does."""
    asked = given.speculative
    if asked is None:
        return None
    known = {"auto", "none", doors.drafter}
    if asked.drafter is not None and asked.drafter not in known:
        raise Refusal(
            400,
            f"speculative.drafter={asked.drafter[:80]!r} is not loaded here; known: "
            f"{', '.join(sorted(known))}",
            param="speculative",
            code="invalid_value",
        )
    if asked.enabled is False or asked.drafter == "none":
        return 0
    return asked.max_draft


def _seed(seed: int | None) -> int | None:
    """OpenAI's seeds are signed; the same one always gives the same noise."""
    return None if seed is None else seed % 2**64


def _salt(salt: str | None, key: ApiKey | None) -> str:
    """Keep apart what different keys computed, and within a key what different salts did."""
    owner = "" if key is None else key.digest.hex()
    return f"{owner}/{salt or ''}" if owner or salt else ""
