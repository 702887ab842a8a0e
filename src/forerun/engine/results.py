"""What callers get: chunks while an answer is made, a result when it is there."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..params import SamplingParams
from ..types import FinishReason, TokenEvent, TokenLogprob
from .request import Request
from .stats import RequestStats

__all__ = ["Bundle", "Chunk", "GenerationResult", "Stream"]


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What became of one prompt."""

    prompt_token_ids: tuple[int, ...]
    text: str  # with the prompt's before it, if echo was asked for
    token_ids: tuple[int, ...]  # with the stop token, if one ended it
    finish_reason: FinishReason
    stats: RequestStats
    seed: int  # what the noise was keyed by: pass it to get the same tokens again
    error: Exception | None  # where finish_reason is "error"
    params: SamplingParams
    sample_index: int  # which of its prompt's n answers this is
    stopped_by: int | str | None  # the stop token or string that ended it, if one did
    logprobs: tuple[TokenLogprob, ...] | None  # of token_ids, if asked for
    # of the prompt's tokens from the second on (nothing says how likely the first was), if asked
    prompt_logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer: what one step gave."""

    text: str
    token_ids: tuple[int, ...]
    num_accepted: int  # the first so many of token_ids were guessed by the drafter
    result: GenerationResult | None  # with the last chunk of each answer
    pieces: tuple[str, ...] = ()  # the text that each token made certain; joined: text, but an echo
    method: str = "none"  # who had guessed
    sample_index: int = 0  # which of the prompt's n answers it belongs to
    logprobs: tuple[TokenLogprob, ...] | None = None  # of token_ids, if asked for


class Stream:
    """The events of one request, put together to chunks and a result by whoever reads them."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.put = self.events.put
        self.result: GenerationResult | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._echo = request.echo  # still to be said

    def take(self, event: TokenEvent) -> Chunk:
        pieces = self._pieces(event)
        text, self._echo = self._echo + "".join(pieces), ""
        self._text.append(text)
        self._token_ids.extend(event.token_ids)
        self._logprobs.extend(event.logprobs or ())
        if event.finish_reason is not None:
            self.result = self._conclude(event.finish_reason, event)
        return Chunk(
            text,
            event.token_ids,
            event.num_accepted,
            self.result,
            pieces,
            event.method,
            self.request.sample_index,
            event.logprobs,
        )

    def _pieces(self, event: TokenEvent) -> tuple[str, ...]:
        """Turn an event's tokens to text, one piece each; the last takes what was withheld.

        Where the engine looks for stop strings it has done so already. Else it is done here, in
        the reader's thread, while the next pass runs.
        """
        detokenizer = self.request.detokenizer
        if event.pieces is None:
            silent = isinstance(event.stopped_by, int)  # a stop token has no text
            spoken = event.token_ids[:-1] if silent else event.token_ids
            pieces = [detokenizer.push(token) for token in spoken] + [""] * silent
        else:
            pieces = list(event.pieces)
        if event.finish_reason is not None:
            rest = detokenizer.finish()
            if pieces:
                pieces[-1] += rest
            elif rest:
                pieces = [rest]
        return tuple(pieces)

    def wait(self) -> GenerationResult:
        while self.result is None:
            self.take(self.events.get())
        return self.result

    def _conclude(self, reason: FinishReason, event: TokenEvent) -> GenerationResult:
        request = self.request
        params = request.params
        return GenerationResult(
            prompt_token_ids=tuple(request.tokens[: request.num_prompt]),
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            stats=request.snapshot(time.perf_counter()),
            seed=request.seed,
            error=event.error,
            params=params,
            sample_index=request.sample_index,
            stopped_by=event.stopped_by,
            logprobs=None if params.logprobs is None else tuple(self._logprobs),
            prompt_logprobs=(
                None if params.prompt_logprobs is None else tuple(request.prompt_logprobs)
            ),
        )


class Bundle:
    """The answers to one prompt, each a stream of its own."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self.streams = tuple(Stream(request) for request in requests)
        self._by_id = {stream.request.request_id: stream for stream in self.streams}

    @property
    def is_done(self) -> bool:
        return all(stream.result is not None for stream in self.streams)

    def take(self, event: TokenEvent) -> Chunk:
        return self._by_id[event.request_id].take(event)
