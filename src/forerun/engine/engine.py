"""The engine as its users see it: prompts in, text out; plain, streamed, and both for asyncio."""

from __future__ import annotations

import asyncio
import itertools
import queue
import secrets
import time
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from ..config import EngineConfig, SpeculationConfig
from ..draft.base import Drafter, make_drafter
from ..errors import (
    ConfigError,
    ContextTooLong,
    EmptyPrompt,
    EngineClosed,
    InvalidParameter,
    InvalidToken,
    refuse_unknown,
)
from ..model.loader import ModelFiles, open_model
from ..params import SamplingParams
from ..registry import resolve_model
from ..text import IncrementalDetokenizer
from ..types import FinishReason, TokenEvent
from .core import EngineCore
from .loop import EngineLoop
from .request import Request
from .setup import make_codec, set_up
from .stats import RequestStats

__all__ = ["Chunk", "Engine", "GenerationResult", "Prompt"]

Message = Mapping[str, Any]
# Text, token ids, or chat messages for the model's template.
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What became of one prompt."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]  # with the stop token, if one ended it
    finish_reason: FinishReason
    stats: RequestStats
    seed: int  # what the noise was keyed by: pass it to get the same tokens again
    error: Exception | None  # where finish_reason is "error"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer: what one step gave."""

    text: str
    token_ids: tuple[int, ...]
    num_accepted: int  # the first so many of token_ids were guessed by the drafter
    result: GenerationResult | None  # with the last chunk


class Engine:
    """A loaded model with its drafter, ready for requests from any thread or event loop."""

    def __init__(
        self, files: ModelFiles, config: EngineConfig, drafter: Drafter | None = None
    ) -> None:
        self.config = config
        self.model_config = files.config
        self.codec = make_codec(files)
        chosen = make_drafter(config.speculation) if drafter is None else drafter
        self._ids = itertools.count()

        def build() -> EngineCore:
            self.machinery = set_up(files, config)
            return EngineCore(self.machinery.runner, self.machinery.scheduler, chosen)

        self._loop = EngineLoop(build)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        drafter: str | Drafter = "auto",
        max_draft: int | None = None,
        speculation: SpeculationConfig | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Load a model by pulled name, Hugging Face folder, `.gguf` file or hub id.

        `options` are the fields of `EngineConfig`; `drafter` and `max_draft` are short for the
        fields of `SpeculationConfig`. A `Drafter` object may stand for a name.

        Raises:
            UnknownOption, ConfigError: an option that does not exist, or does not fit.
            ModelNotFound, ModelFileError, UnsupportedModel: what is wrong with the model.
            CapacityError: not enough memory for the cache.
        """
        known = [each.name for each in fields(EngineConfig)]
        refuse_unknown(options, [*known, "drafter", "max_draft"], "Engine.from_pretrained")
        named = isinstance(drafter, str) and drafter != "auto"
        short: dict[str, Any] = {"drafter": drafter} if named else {}
        if max_draft is not None:
            short["max_draft"] = max_draft
        spec = _combine(speculation, short)
        if not isinstance(drafter, str) and not hasattr(drafter, "propose"):
            raise ConfigError(f"drafter={drafter!r} is neither a name nor a drafter")
        config = EngineConfig(**options, speculation=spec)
        own = None if isinstance(drafter, str) else drafter
        return cls(open_model(resolve_model(model)), config, own)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationResult]:
        """Answer one prompt or many, batched; results come in the order of the prompts.

        All prompts are checked before the first one starts. One that fails on the way has
        `finish_reason` "error" and its `error`; the others are unaffected.
        """
        streams = [_Stream(request) for request in self._make_requests(prompts, params)]
        try:
            for stream in streams:
                self._loop.submit(stream.request, stream.put)
            return [stream.wait() for stream in streams]
        except BaseException:
            self._abandon(streams)
            raise

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[Chunk, None, None]:
        """Answer one prompt piece by piece. Closing the iterator cancels the request."""
        request = self._make_request(prompt, _checked(params or SamplingParams()))
        return self._stream(_Stream(request))

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationResult]:
        """`generate` for asyncio: the event loop goes on meanwhile; cancelling cancels."""
        requests = self._make_requests(prompts, params)
        return list(await asyncio.gather(*map(self._finish, requests)))

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[Chunk]:
        """`stream` for asyncio."""
        request = self._make_request(prompt, _checked(params or SamplingParams()))
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        stream = _Stream(request)
        self._loop.submit(request, lambda event: _post(loop, events, event))
        try:
            while stream.result is None:
                yield stream.take(await events.get())
        finally:
            self._abandon([stream])

    def encode(self, prompt: Prompt) -> list[int]:
        """Turn a prompt of any form into token ids, as `generate` would."""
        if isinstance(prompt, str):
            return self.codec.encode(prompt)
        items = _as_list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return self.codec.encode_chat(items)
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise InvalidParameter(f"{item!r} in a prompt of token ids is not an integer")
            if not 0 <= item < self.model_config.vocab_size:
                raise InvalidToken(
                    f"token id {item} is outside the vocabulary (0 to "
                    f"{self.model_config.vocab_size - 1})"
                )
        return items

    def close(self) -> None:
        """End all requests and the engine's thread."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        many = _split(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(many)
        else:
            each = _as_list(params, "params is a SamplingParams or a list of them")
        each = [_checked(one) for one in each]
        if len(each) != len(many):
            raise InvalidParameter(f"{len(each)} sampling params for {len(many)} prompts")
        return [self._make_request(*pair) for pair in zip(many, each, strict=True)]

    def _make_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        tokens = self.encode(prompt)
        limit, vocabulary = self.machinery.max_model_len, self.model_config.vocab_size
        if not tokens:
            raise EmptyPrompt("the prompt has no tokens; give it at least one character")
        if len(tokens) >= limit:
            raise ContextTooLong(
                f"the prompt has {len(tokens)} tokens and the context is {limit}, of which at "
                "least one is for the answer; shorten it or raise max_model_len"
            )
        for token in params.stop_token_ids:
            if token >= vocabulary:
                raise InvalidToken(
                    f"stop token id {token} is outside the vocabulary (0 to {vocabulary - 1})"
                )
        room = limit - len(tokens)
        own_stops = () if params.ignore_eos else self.model_config.eos_token_ids
        return Request(
            request_id=next(self._ids),
            tokens=list(tokens),
            num_prompt=len(tokens),
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            stop_ids=frozenset([*own_stops, *params.stop_token_ids]),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            detokenizer=IncrementalDetokenizer(
                self.codec, stop_strings=params.stop_strings, prompt_tail=tokens
            ),
            arrival_s=time.perf_counter(),
        )

    def _stream(self, stream: _Stream) -> Generator[Chunk, None, None]:
        self._loop.submit(stream.request, stream.put)
        try:
            while stream.result is None:
                yield stream.take(stream.events.get())
        finally:
            self._abandon([stream])

    async def _finish(self, request: Request) -> GenerationResult:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        stream = _Stream(request)
        self._loop.submit(request, lambda event: _post(loop, events, event))
        try:
            while stream.result is None:
                stream.take(await events.get())
            return stream.result
        finally:
            self._abandon([stream])

    def _abandon(self, streams: Sequence[_Stream]) -> None:
        """Cancel what nobody waits for any more."""
        for stream in streams:
            if stream.result is None:
                try:
                    self._loop.cancel(stream.request.request_id)
                except EngineClosed:
                    return


class _Stream:
    """The events of one request, put together to chunks and a result by whoever reads them."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.put = self.events.put
        self.result: GenerationResult | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []

    def take(self, event: TokenEvent) -> Chunk:
        self._text.append(event.text)
        self._token_ids.extend(event.token_ids)
        if event.finish_reason is not None:
            self.result = self._conclude(event.finish_reason, event.error)
        return Chunk(event.text, event.token_ids, event.num_accepted, self.result)

    def wait(self) -> GenerationResult:
        while self.result is None:
            self.take(self.events.get())
        return self.result

    def _conclude(self, reason: FinishReason, error: Exception | None) -> GenerationResult:
        request = self.request
        return GenerationResult(
            prompt_token_ids=tuple(request.tokens[: request.num_prompt]),
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            stats=request.snapshot(time.perf_counter()),
            seed=request.seed,
            error=error,
        )


def _combine(
    speculation: SpeculationConfig | Mapping[str, Any] | None, short: Mapping[str, Any]
) -> SpeculationConfig:
    """Join the two ways of naming speculation settings; neither silently wins over the other."""
    if speculation is None:
        speculation = {}
    if isinstance(speculation, Mapping):
        return SpeculationConfig.from_dict({**speculation, **short})
    if not isinstance(speculation, SpeculationConfig):
        raise ConfigError(f"speculation={speculation!r} is neither a mapping nor a config")
    for name, value in short.items():
        if getattr(speculation, name) != value:
            raise ConfigError(
                f"{name}={value!r} contradicts speculation.{name}={getattr(speculation, name)!r}; "
                "give one of them"
            )
    return speculation


def _checked(params: object) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise InvalidParameter(
            f"{params!r} is not a SamplingParams; SamplingParams.from_dict makes one of a dict"
        )
    return params


def _split(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from many: a list of numbers or of messages is one."""
    if isinstance(prompts, str):
        return [prompts]
    items = _as_list(prompts)
    if items and isinstance(items[0], int | Mapping):
        return [items]
    return items


def _as_list(given: object, wanted: str = "a prompt is text, token ids or messages") -> list[Any]:
    """Copy a sequence of things; text and bytes are no such sequence."""
    if isinstance(given, bytes | bytearray | str) or not isinstance(given, Sequence):
        raise InvalidParameter(f"{wanted}, not {type(given).__name__}")
    return list(given)


def _post(
    loop: asyncio.AbstractEventLoop, events: asyncio.Queue[TokenEvent], event: TokenEvent
) -> None:
    """Hand an event to another thread's event loop, unless that has gone."""
    try:
        loop.call_soon_threadsafe(events.put_nowait, event)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return
