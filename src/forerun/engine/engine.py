"""The engine as its users see it: prompts in, text out; plain, streamed, and both for asyncio."""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, Self

from ..config import EngineConfig, SpeculationConfig
from ..draft.base import Drafter, check_drafter, make_drafter
from ..errors import ConfigError, EngineClosed, InvalidParameter, refuse_unknown
from ..model.loader import ModelFiles, open_model
from ..params import SamplingParams
from ..registry import resolve_model
from ..sampling import Chooser, make_chooser
from ..types import TokenEvent
from .core import EngineCore, StepObserver
from .faults import FaultyDrafter, FaultyRunner, faults_asked_for
from .intake import Intake
from .loop import EngineLoop, Pulse, Sink
from .request import Request
from .results import Bundle, Chunk, GenerationResult, Stream
from .runner import Runner
from .setup import Machinery, make_codec, set_up

__all__ = ["Chunk", "Engine", "GenerationResult", "Prompt"]

Message = Mapping[str, Any]
# Text, token ids, or chat messages for the model's template.
Prompt = str | Sequence[int] | Sequence[Message]


class Engine:
    """A loaded model with its drafter, ready for requests from any thread or event loop."""

    machinery: Machinery  # what it runs on

    def __init__(
        self,
        files: ModelFiles,
        config: EngineConfig,
        drafter: Drafter | None = None,  # None: as config.speculation says, like `choose`
        choose: Chooser | None = None,
        wrap: Callable[[Drafter], Drafter] | None = None,  # put around the configured drafter
    ) -> None:
        self.config = config
        self.model_config = files.config
        self.codec = make_codec(files)
        if drafter is None:
            check_drafter(config.speculation)  # before a model is loaded for nothing
        faults = faults_asked_for()
        self._ids = itertools.count()
        chosen_rule = choose or make_chooser(config.speculation.accept_rule)

        def build() -> EngineCore:
            self.machinery = set_up(files, config, faults)
            runner: Runner = self.machinery.runner
            chosen = drafter or make_drafter(config.speculation, self.machinery.setting)
            if wrap is not None:
                chosen = wrap(chosen)
            if faults is not None:
                runner = FaultyRunner(runner, faults)
                chosen = FaultyDrafter(chosen, faults)
            return EngineCore(runner, self.machinery.scheduler, chosen, chosen_rule)

        self._loop = EngineLoop(build)
        self._intake = Intake(
            self.codec,
            vocab_size=files.config.vocab_size,
            eos_token_ids=files.config.eos_token_ids,
            max_model_len=self.machinery.max_model_len,
        )

    @property
    def max_model_len(self) -> int:
        """The longest context, prompt and answer, in tokens."""
        return self.machinery.max_model_len

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        drafter: str | Drafter = "auto",
        max_draft: int | None = None,
        speculation: SpeculationConfig | Mapping[str, Any] | None = None,
        wrap: Callable[[Drafter], Drafter] | None = None,
        **options: Any,
    ) -> Self:
        """Load a model by pulled name, Hugging Face folder, `.gguf` file or hub id.

        `options` are the fields of `EngineConfig`; `drafter` and `max_draft` are short for the
        fields of `SpeculationConfig`. A `Drafter` object may stand for a name; `wrap` is given the
        drafter and returns what is to be used in its place.

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
        return cls(open_model(resolve_model(model)), config, own, wrap=wrap)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationResult]:
        """Answer one prompt or many, batched; results come in the order of the prompts.

        A prompt whose params ask for n answers has n results, one after the other.
        All prompts are checked before the first one starts. One that fails on the way has
        `finish_reason` "error" and its `error`; the others are unaffected.
        """
        streams = [Stream(request) for request in self._make_requests(prompts, params)]
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
        """Answer one prompt piece by piece. Closing the iterator cancels the request.

        The chunks of n answers come as they are made; `sample_index` says whose each is.
        """
        return self._stream(self.prepare(prompt, params))

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None) -> Bundle:
        """Check a prompt and its params, and make its requests, without starting anything."""
        return Bundle(self._make_samples(prompt, params))

    def start(self, bundle: Bundle, sink: Sink) -> None:
        """Start prepared requests. `sink` gets their events in the engine's thread, for
        `Bundle.take`; it must neither block nor raise.
        """
        for request in bundle.requests:
            self._loop.submit(request, sink)

    def cancel(self, bundle: Bundle) -> None:
        """End within one step whatever of a bundle still runs; its last events say so."""
        self._abandon(bundle.streams)

    def observe(self, observer: StepObserver) -> None:
        """Have every step reported from now on, in the engine's thread."""
        self._loop.call(lambda core: core.observers.append(observer)).result()

    def call(self, function: Callable[[EngineCore], Any]) -> Future[Any]:
        """Run a function between two steps in the engine's thread; for checks and for tests."""
        return self._loop.call(function)

    @property
    def load(self) -> tuple[int, int, int]:
        """Requests that run and that wait, and cache blocks in use, at this moment."""
        return self._loop.load

    def pulse(self) -> Pulse:
        """Say whether the engine's thread lives, and since when its step has run."""
        return self._loop.pulse()

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
        bundle = self.prepare(prompt, params)
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        try:
            for request in bundle.requests:
                self._loop.submit(request, lambda event: _post(loop, events, event))
            while not bundle.is_done:
                yield bundle.take(await events.get())
        finally:
            self._abandon(bundle.streams)

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
            self._intake.check_token(item, "token id")
        return items

    def close(self) -> None:
        """End all requests and the engine's thread."""
        self._loop.close()
        self._intake.close()

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
        pairs = zip(many, each, strict=True)
        return [request for pair in pairs for request in self._make_samples(*pair)]

    def _make_samples(self, prompt: Prompt, params: SamplingParams | None) -> list[Request]:
        """Make the requests for a prompt's n answers."""
        params = _checked(params or SamplingParams())
        tokens = self.encode(prompt)
        echo = ""
        if params.echo:
            echo = prompt if isinstance(prompt, str) else self.codec.decode(tokens)
        return [
            self._intake.make(next(self._ids), tokens, params, index, echo)
            for index in range(params.n)
        ]

    def _stream(self, bundle: Bundle) -> Generator[Chunk, None, None]:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        try:
            for request in bundle.requests:
                self._loop.submit(request, events.put)
            while not bundle.is_done:
                yield bundle.take(events.get())
        finally:
            self._abandon(bundle.streams)

    async def _finish(self, request: Request) -> GenerationResult:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        stream = Stream(request)
        self._loop.submit(request, lambda event: _post(loop, events, event))
        try:
            while stream.result is None:
                stream.take(await events.get())
            return stream.result
        finally:
            self._abandon([stream])

    def _abandon(self, streams: Sequence[Stream]) -> None:
        """Cancel what nobody waits for any more."""
        for stream in streams:
            if stream.result is None:
                try:
                    self._loop.cancel(stream.request.request_id)
                except EngineClosed:
                    return


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
