"""What every endpoint of a server works with: the engine, its limits, its counters, its clock."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from .._version import __version__
from ..device import cpu_name
from ..engine.engine import Engine
from ..engine.results import Bundle
from ..errors import DeadlineExceeded, EmptyPrompt, InvalidConstraint, InvalidToken
from ..params import SamplingParams
from .asked import Doors
from .config import ServerConfig
from .failures import Refusal, describe, refuse_context
from .fields import GenerationFields, refuse_dangerous
from .generation import Generation, Generations
from .history import History
from .keys import ApiKey
from .metrics import Metrics
from .sse import until_disconnect
from .token_texts import TokenTexts

__all__ = ["Service", "service_of"]

Answer = TypeVar("Answer")
PREPARERS = 2  # threads that render, encode and compile; more would only take from the engine


class Service:
    """One model being served. Made in the event loop, used by every endpoint."""

    def __init__(
        self, engine: Engine, config: ServerConfig, metrics: Metrics, history: History
    ) -> None:
        self.engine = engine
        self.config = config
        self.metrics = metrics
        self.history = history
        self.generations = Generations(engine, config, metrics, history)
        self.created = int(time.time())
        self.started_s = time.monotonic()
        self.method: str = engine.call(lambda core: core.method).result()
        self.doors = Doors(self.method, config.max_samples)
        self._preparers = ThreadPoolExecutor(PREPARERS, "forerun-prepare")
        self._compilers = ThreadPoolExecutor(PREPARERS, "forerun-compile")

    @cached_property
    def fingerprint(self) -> str:
        """Name what answers: same name, same answers to the same seed."""
        machinery = self.engine.machinery
        parts = (
            __version__,
            self.config.model_name,
            str(machinery.dtype),
            machinery.kernels,
            self.engine.config.quantize,
        )
        return "fr_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Texts and bytes of single tokens; made when log-probabilities are first asked for."""
        return TokenTexts(self.engine.codec, self.engine.model_config.vocab_size)

    @property
    def machine(self) -> str:
        """Name what it runs on."""
        machinery = self.engine.machinery
        dtype = str(machinery.dtype).removeprefix("torch.")
        where = cpu_name() if machinery.device.type == "cpu" else str(machinery.device)
        count = machinery.num_threads
        threads = f"{count} thread{'' if count == 1 else 's'}"
        return f"{where}, {threads}, {dtype}, {machinery.kernels} kernels"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(self.engine.model_config.eos_token_ids)

    @property
    def max_draft(self) -> int:
        return self.engine.config.speculation.max_draft

    @property
    def status(self) -> str:
        """ready, draining, stuck (a step hangs) or dead."""
        pulse = self.engine.pulse()
        if not pulse.is_alive:
            return "dead"
        if self.generations.admission.is_draining:
            return "draining"
        return "stuck" if pulse.hangs(self.config.longest_step_s) else "ready"

    def check(self, given: GenerationFields) -> None:
        """Refuse what can be refused before any work: another model, fields not obeyed."""
        self.check_model(given.model)
        refuse_dangerous(given)
        if given.stream_options is not None and not given.stream:
            raise Refusal(
                400,
                "stream_options are for streams; set stream to true or leave them out",
                param="stream_options",
                code="invalid_value",
            )
        self.generations.admission.check_open()

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here."""
        if name is not None and name not in self.config.model_names:
            raise Refusal(
                404,
                f"the model {name[:128]!r} does not exist here; this server has "
                f"{', '.join(self.config.model_names)}",
                param="model",
                code="model_not_found",
            )

    async def prepare(
        self,
        http: HttpRequest,
        work: Callable[..., Answer],
        *given: Any,
        timeout_s: float | None = None,
        compiles: bool = False,
    ) -> Answer:
        """Do work that takes processor time beside the event loop, on behalf of a request.

        What `compiles` has threads of its own: nobody else is to wait for a grammar.

        Raises:
            Overloaded, RateLimited: too much is being prepared.
            DeadlineExceeded: the request's time was over before the work was begun or done.
            ClientDisconnect: nobody waits for it any more.
        """
        pool = self._compilers if compiles else self._preparers
        with self.generations.preparing(http.state.key):
            future = pool.submit(work, *given)

            async def wait() -> tuple[Answer]:
                return (await asyncio.wrap_future(future),)

            try:
                async with asyncio.timeout_at(self.deadline_s(http, timeout_s)):
                    done = await until_disconnect(http.receive, wait())
            except TimeoutError:
                raise DeadlineExceeded("the request's time was over before it was begun") from None
            finally:
                future.cancel()  # if nobody has taken it up
        if done is None:
            raise ClientDisconnect
        return done[0]

    def deadline_s(self, http: HttpRequest, timeout_s: float | None) -> float:
        """Say until when, by the event loop's clock, a request is to be answered whole."""
        most_s = self.config.request_timeout_s
        arrival_s: float = http.state.arrival_s
        return arrival_s + min(most_s if timeout_s is None else timeout_s, most_s)

    def close(self) -> None:
        """Let go of the threads; what is still waiting for them is dropped."""
        for pool in (self._preparers, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)

    def make(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        param: str,
        constraint: str | None = None,
    ) -> Bundle:
        """Check a prompt against the context and make its requests.

        `param` and `constraint` are the fields that prompt and constraint came in.

        Raises:
            Refusal: prompt and answer do not fit the context, in the classic sentence.
            ForerunError: whatever else is wrong.
        """
        try:
            tokens = self.engine.encode(prompt)
            limit = self.engine.max_model_len
            asked = 1 if params.max_tokens is None else params.max_tokens
            if len(tokens) + asked > limit:
                raise refuse_context(limit, len(tokens), asked, param)
            return self.engine.prepare(prompt if params.echo else tokens, params)
        except InvalidConstraint as error:
            raise Refusal(400, str(error), param=constraint, code="invalid_value") from None
        except (EmptyPrompt, InvalidToken) as error:
            found = describe(error, "")
            found.param = found.param or param
            raise found from None

    def open(
        self, bundles: Sequence[Bundle], http: HttpRequest, timeout_s: float | None
    ) -> Generation:
        """Admit prepared prompts on behalf of whoever sent the request."""
        key: ApiKey | None = http.state.key
        return self.generations.open(bundles, key, self.deadline_s(http, timeout_s))


def service_of(http: HttpRequest) -> Service:
    """Find the service that a request is for."""
    service: Service = http.state.service
    return service
