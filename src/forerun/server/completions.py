"""Completions: plain prompts, as text or token ids, one or many; echo with log-probabilities.

Evaluation harnesses measure how likely a text is by echoing it with log-probabilities and asking
for one token more, or none.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, StrictBool, WithJsonSchema

from ..engine.results import Bundle, Chunk, GenerationResult
from ..errors import InvalidParameter
from .asked import constraint_field, read_constraint, read_params
from .endings import finish_reason, marks, stop_reason
from .failures import Refusal
from .fields import GenerationFields
from .gathering import gather
from .generation import Generation
from .keys import ApiKey
from .service import Service
from .sse import DONE, frame
from .streams import error_frame
from .tally import costs_of, usage_of
from .token_texts import Offsets

__all__ = ["CompletionAnswer", "CompletionFields", "prepare_completions"]

DEFAULT_MAX_TOKENS = 16  # OpenAI's

MAX_LISTED = 2**20


def _check_prompt(given: object) -> str | list[str] | list[int] | list[list[int]]:
    """Take text, token ids, or a list of either; the first thing that is none of it is told.

    By hand: a union of four types would try each on every element, and gather every fault.
    """
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ValueError("text, token ids, or a list of either is needed")
    if len(given) > MAX_LISTED:
        raise ValueError(f"{len(given)} elements; {MAX_LISTED} are the most")
    kind = type(given[0]) if given else str
    if kind not in (str, int, list):
        raise ValueError(f"element 0 is {type(given[0]).__name__}: no text, no token id")
    for place, each in enumerate(given):
        if type(each) is not kind:
            raise ValueError(f"element {place} is of another type than element 0")
        if kind is list:
            if len(each) > MAX_LISTED:
                raise ValueError(f"element {place} has {len(each)} ids; {MAX_LISTED} are the most")
            wrong = next((i for i, token in enumerate(each) if type(token) is not int), None)
            if wrong is not None:
                raise ValueError(f"element {place}, id {wrong} is no integer")
    return given


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class CompletionFields(GenerationFields):
    """The body of a completion."""

    prompt: Prompt
    echo: StrictBool | None = None
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None


def prepare_completions(
    service: Service, given: CompletionFields, key: ApiKey | None
) -> list[Bundle]:
    """Check everything and make the requests of each prompt. Takes processor time.

    Raises:
        Refusal, ForerunError: whatever is wrong, before anything is started.
    """
    prompts = _split(given.prompt)
    if len(prompts) > service.config.max_prompts:
        raise Refusal(
            400,
            f"prompt holds {len(prompts)} prompts; {service.config.max_prompts} are the most",
            param="prompt",
            code="invalid_value",
        )
    echo = bool(given.echo)
    with_prompt = echo and given.logprobs is not None
    max_tokens = DEFAULT_MAX_TOKENS if given.max_tokens is None else given.max_tokens
    prompt_logprobs = given.logprobs if with_prompt else given.prompt_logprobs
    params = read_params(
        given.model_copy(update={"prompt_logprobs": prompt_logprobs}),
        service.doors,
        key,
        max_tokens=max_tokens,
        logprobs=given.logprobs,
        constraint=read_constraint(given.response_format, given.structured_outputs),
        echo=echo,
    )
    if given.logprobs is not None or given.prompt_logprobs is not None:
        service.token_texts  # noqa: B018  (made here, beside the event loop)
    field = constraint_field(given)
    return [service.make(prompt, params, "prompt", field) for prompt in prompts]


def _split(prompt: str | list[Any]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidParameter("prompt=[] is empty; send text or token ids")
    return [prompt] if isinstance(prompt[0], int) else prompt


class CompletionAnswer:
    """One request's completions on their way out."""

    def __init__(
        self,
        service: Service,
        given: CompletionFields,
        bundles: Sequence[Bundle],
        generation: Generation,
        request_id: str,
    ) -> None:
        self._service = service
        self._given = given
        self._bundles = bundles
        self._generation = generation
        self._request_id = request_id
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        places = [(bundle, n) for bundle in bundles for n in range(len(bundle.requests))]
        self._choices = [
            _Choice(index, service, given, bundle, n) for index, (bundle, n) in enumerate(places)
        ]

    async def whole(self) -> dict[str, Any]:
        """Wait for all answers."""
        async for piece in self._generation.pieces():
            self._choices[piece.index].add(piece.chunk)
        return {
            **self._head(),
            "choices": [choice.whole() for choice in self._choices],
            "usage": self._usage(),
            **self._costs(),
        }

    async def frames(self) -> AsyncIterator[bytes]:
        """Write the answers as a stream; always ends with [DONE]."""
        padding = self._service.config.stream_padding
        interval = 1 if self._given.marks_drafts else self._service.config.stream_interval
        head = self._head()
        try:
            async for piece in gather(self._generation.pieces(), interval):
                shown = self._choices[piece.index].chunk(piece.chunk)
                if shown is not None:
                    running = {"usage": self._usage()} if self._given.wants_running_usage() else {}
                    yield frame(head | running | {"choices": [shown]}, padding)
            if self._given.wants_usage():
                last = {
                    **head,
                    "choices": [],
                    "usage": self._usage(),
                    **self._costs(),
                }
                yield frame(last, padding)
        except Exception as error:  # noqa: BLE001  (told in the stream, which has begun)
            yield error_frame(error, self._request_id, padding)
        yield DONE

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._given.model or self._service.config.model_name,
            "system_fingerprint": self._service.fingerprint,
        }

    def _usage(self) -> dict[str, Any]:
        firsts = [bundle.requests[0] for bundle in self._bundles]
        return usage_of(
            sum(each.num_prompt for each in firsts),
            sum(choice.num_tokens for choice in self._choices),
            sum(each.counters.num_cached_tokens for each in firsts),
        )

    def _costs(self) -> dict[str, Any]:
        return costs_of([each.result for each in self._choices], self._service.max_draft)


class _Choice:
    """One of the answers: what it has said so far."""

    def __init__(
        self, index: int, service: Service, given: CompletionFields, bundle: Bundle, n: int
    ) -> None:
        self._index = index
        self._service = service
        self._given = given
        self._request = bundle.requests[n]
        self._text: list[str] = []
        self._offsets = Offsets()  # of the tokens whose log-probabilities were told
        self._prompt_told = not given.echo or given.logprobs is None
        self._logprobs: list[dict[str, list[Any]]] = []
        self.num_tokens = 0
        self.result: GenerationResult | None = None

    def add(self, chunk: Chunk) -> None:
        """Remember what a chunk brought, for the whole answer."""
        self.num_tokens += len(chunk.token_ids)
        self.result = chunk.result
        self._text.append(chunk.text)
        told = self._tell(chunk)
        if told is not None:
            self._logprobs.append(told)

    def chunk(self, chunk: Chunk) -> dict[str, Any] | None:
        """Write what a chunk brought as a stream's choice; None: nothing yet."""
        self.num_tokens += len(chunk.token_ids)
        self.result = chunk.result
        told = self._tell(chunk)
        silent = not chunk.text and not told and chunk.result is None
        if silent and not (self._given.marks_drafts or self._given.return_token_ids):
            return None
        shown = {
            "index": self._index,
            "text": chunk.text,
            "logprobs": told,
            "finish_reason": None if chunk.result is None else finish_reason(chunk.result),
            "stop_reason": None if chunk.result is None else self._stop_reason(chunk.result),
        }
        if self._given.marks_drafts:
            shown["speculative"] = marks(chunk)
        if self._given.return_token_ids:
            shown["token_ids"] = list(chunk.token_ids)
        return shown

    def whole(self) -> dict[str, Any]:
        """Write the finished answer."""
        result = self.result
        if result is None:
            raise RuntimeError("an answer ended without a result")
        choice: dict[str, Any] = {
            "index": self._index,
            "text": "".join(self._text),
            "logprobs": _join(self._logprobs) if self._given.logprobs is not None else None,
            "finish_reason": finish_reason(result),
            "stop_reason": self._stop_reason(result),
        }
        if self._given.prompt_logprobs is not None and result.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._service.token_texts.prompt(result.prompt_logprobs)
        if self._given.return_token_ids:
            choice["token_ids"] = list(result.token_ids)
            choice["prompt_token_ids"] = list(result.prompt_token_ids)
        return choice

    def _stop_reason(self, result: GenerationResult) -> int | str | None:
        return stop_reason(self._service.eos_token_ids, result)

    def _tell(self, chunk: Chunk) -> dict[str, list[Any]] | None:
        """Write a chunk's log-probabilities; the prompt's come before the first of them."""
        if self._given.logprobs is None:
            return None
        told: list[Any] = []
        if not self._prompt_told:
            # The first event comes when the whole prompt has been scored.
            self._prompt_told = True
            told = [self._request.tokens[0], *self._request.prompt_logprobs]
        told += chunk.logprobs or ()
        if not told:
            return None
        return self._service.token_texts.completion(told, self._offsets, self._given.logprobs)


def _join(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for part in parts for value in part[name]] for name in names}
