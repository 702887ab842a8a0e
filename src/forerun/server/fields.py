"""The fields that every generating request may hold, by type; and the ones that are refused.

Nulls are accepted wherever a field may be left out: benchmark clients send them. Unknown fields are
accepted and named in a header of the answer, but for those that would silently change what is
sampled: these are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
)

from .failures import Refusal

__all__ = [
    "GenerationFields",
    "JsonSchemaFormat",
    "Objects",
    "ResponseFormat",
    "Speculative",
    "StreamOptions",
    "StructuredOutputs",
    "TokenIds",
    "ignored_fields",
    "refuse_dangerous",
]

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)]
Text = Annotated[str, Field(strict=True)]
ShortText = Annotated[str, Field(strict=True, max_length=256)]
STOP_STRINGS = 4
# Lists end at their first fault: a million faults in a body would take a minute to describe.
TokenIds = Annotated[list[StrictInt], Field(max_length=2**20, fail_fast=True)]
Strings = Annotated[list[ShortText], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=4096, fail_fast=True)]
MAX_BIASES = 1024
MAX_IDS = 1024
MAX_BAD_WORDS = 128


def _check_size(given: object) -> object:
    """Refuse too many biases before any of them is looked at."""
    if isinstance(given, dict) and len(given) > MAX_BIASES:
        raise ValueError(f"{len(given)} entries; {MAX_BIASES} are the most")
    return given


class Loose(BaseModel):
    """Takes fields that it does not know; they are named, not obeyed."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Strict(BaseModel):
    """Takes no field that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(Loose):
    """What a stream tells beside text."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class Speculative(Strict):
    """How to draft for this request; none of it changes what is said."""

    enabled: StrictBool | None = None
    drafter: ShortText | None = None
    max_draft: Annotated[int, Field(strict=True, ge=0, le=1024)] | None = None
    mark: StrictBool | None = None  # say of each chunk which of its tokens had been guessed


class JsonSchemaFormat(Loose):
    """A schema with a name, as OpenAI's clients send it."""

    name: ShortText | None = None
    schema_: dict[str, Any] | StrictBool | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Strict):
    """What the answer must look like, in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Strict):
    """The same in vLLM's words: exactly one of them."""

    json_: dict[str, Any] | StrictStr | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(max_length=4096, fail_fast=True)] | None = None
    grammar: Text | None = None


class GenerationFields(Loose):
    """What chat completions and completions have in common."""

    model: ShortText | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], BeforeValidator(_check_size)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    n: Annotated[int, Field(strict=True, ge=1, lt=2**64)] | None = None
    seed: Count | None = None
    stop: ShortText | Annotated[Strings, Field(max_length=STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_IDS)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[Strings, Field(max_length=MAX_BAD_WORDS)] | None = None
    ignore_eos: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Count | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    prompt_logprobs: Count | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Count | None = None
    cache_salt: ShortText | None = None
    timeout_s: Annotated[float, Field(strict=True, gt=0, le=86400)] | None = None
    speculative: Speculative | None = None
    return_token_ids: StrictBool | None = None
    user: ShortText | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    spaces_between_special_tokens: StrictBool | None = None

    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def wants_running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def marks_drafts(self) -> bool:
        return bool(self.speculative and self.speculative.mark)


# Fields that would change what is sampled, if they were obeyed; and what to send instead.
REFUSED: Mapping[str, str] = {
    "guided_json": "send structured_outputs.json",
    "guided_regex": "send structured_outputs.regex",
    "guided_choice": "send structured_outputs.choice",
    "guided_grammar": "send structured_outputs.grammar",
    "guided_decoding_backend": "leave it out",
    "guided_whitespace_pattern": "leave it out",
    "guided_decoding": "send structured_outputs",
    "regex": "send structured_outputs.regex",
    "ebnf": "send structured_outputs.grammar, in Lark's notation",
    "grammar": "send structured_outputs.grammar, in Lark's notation",
    "json_schema": "send response_format",
    "structural_tag": "send tools with tool_choice",
    "functions": "send tools",
    "function_call": "send tool_choice",
    "chat_template": "the model's own template is used",
    "prompt_embeds": "send text or token ids",
    "suffix": "text cannot be filled in here",
    "use_beam_search": "leave it out",
    "length_penalty": "leave it out",
    "logits_processors": "leave it out",
    "logprob_token_ids": "ask for top_logprobs",
    "stop_regex": "send stop",
    "repetition_detection": "leave it out",
    "truncate_prompt_tokens": "shorten the prompt",
    "tfs_z": "leave it out",
    "top_a": "leave it out",
    "t_max_predict_ms": "send timeout_s",
    "audio": "only text is answered",
}
REFUSED_PREFIXES = ("dry_", "xtc_", "mirostat", "guided_", "dynatemp_")
# Fields that say nothing at these values, and would change what is sampled at others.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "include_stop_str_in_output": (None, False),
    "spaces_between_special_tokens": (None, True),
    "modalities": (None, ["text"]),
}


def refuse_dangerous(given: GenerationFields) -> None:
    """Refuse fields that are known and not obeyed here.

    Raises:
        Refusal: 400 that names the field and what to send instead.
    """
    extra = given.model_extra or {}
    for name, values in HARMLESS.items():
        value = extra.get(name, getattr(given, name, None))
        if not any(value is each or value == each for each in values):
            raise Refusal(
                400,
                f"{name}={str(value)[:80]} is not supported; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    for name, value in extra.items():
        if value is None or name in HARMLESS:
            continue
        if name in REFUSED or name.startswith(REFUSED_PREFIXES):
            instead = REFUSED.get(name, "leave it out")
            raise Refusal(
                400,
                f"{name[:80]} is not supported; {instead}",
                param=name[:80],
                code="unsupported_parameter",
            )


def ignored_fields(given: BaseModel) -> str:
    """Name the fields that were given and mean nothing here, for a header."""
    extra = given.model_extra or {}
    names = [name for name, value in extra.items() if value is not None and name.isidentifier()]
    names += ["user"] if getattr(given, "user", None) is not None else []
    return ", ".join(name[:64] for name in sorted(names)[:32] if name.isascii())
