"""Chat completions: from pieces to the answer's JSON, whole and as a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from ..engine.results import Chunk, GenerationResult
from ..types import FinishReason
from .chat import ChatFields, PreparedChat
from .endings import finish_reason, marks, stop_reason
from .gathering import gather
from .generation import Generation
from .reading import read_deltas
from .service import Service
from .sse import DONE, frame
from .streams import error_frame
from .tally import costs_of, usage_of
from .tools import ArgumentsDelta, CallStarted, ContentDelta, Delta, ToolCallParser

__all__ = ["ChatAnswer"]


class ChatAnswer:
    """One chat completion on its way out."""

    def __init__(
        self,
        service: Service,
        given: ChatFields,
        prepared: PreparedChat,
        generation: Generation,
        request_id: str,
    ) -> None:
        self._service = service
        self._given = given
        self._generation = generation
        self._request_id = request_id
        self._bundle = prepared.bundle
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._choices = [
            _Choice(index, service, given, prepared.parser())
            for index in range(len(prepared.bundle.requests))
        ]

    async def whole(self) -> dict[str, Any]:
        """Wait for all answers."""
        async for piece in self._generation.pieces():
            choice = self._choices[piece.index]
            choice.add(piece.chunk)
        return {
            **self._head("chat.completion"),
            "choices": [choice.whole() for choice in self._choices],
            "usage": self._usage(),
            **self._costs(),
        }

    async def frames(self) -> AsyncIterator[bytes]:
        """Write the answers as a stream; always ends with [DONE]."""
        padding = self._service.config.stream_padding
        head = self._head("chat.completion.chunk")
        try:
            for choice in self._choices:
                yield frame(head | self._running_usage() | {"choices": [choice.opening()]}, padding)
            interval = 1 if self._given.marks_drafts else self._service.config.stream_interval
            async for piece in gather(self._generation.pieces(), interval):
                choice = self._choices[piece.index]
                for shown in choice.chunks(piece.chunk):
                    yield frame(head | self._running_usage() | {"choices": [shown]}, padding)
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

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._given.model or self._service.config.model_name,
            "system_fingerprint": self._service.fingerprint,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt = self._bundle.requests[0].num_prompt
        num_cached = self._bundle.requests[0].counters.num_cached_tokens
        return usage_of(num_prompt, sum(each.num_tokens for each in self._choices), num_cached)

    def _costs(self) -> dict[str, Any]:
        return costs_of([each.result for each in self._choices], self._service.max_draft)

    def _running_usage(self) -> dict[str, Any]:
        return {"usage": self._usage()} if self._given.wants_running_usage() else {}


class _Choice:
    """One of the answers: what it has said so far."""

    def __init__(
        self, index: int, service: Service, given: ChatFields, parser: ToolCallParser | None
    ) -> None:
        self._index = index
        self._service = service
        self._given = given
        self._parser = parser
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self.num_tokens = 0
        self.result: GenerationResult | None = None

    def opening(self) -> dict[str, Any]:
        """Say the role, before anything else."""
        return self._chunk({"role": "assistant", "content": ""})

    def add(self, chunk: Chunk) -> None:
        """Remember what a chunk brought, for the whole answer."""
        self.num_tokens += len(chunk.token_ids)
        self.result = chunk.result
        self._logprobs += self._told(chunk)
        for delta in read_deltas(self._parser, chunk):
            match delta:
                case ContentDelta(text):
                    self._content.append(text)
                case CallStarted(_, call_id, name):
                    self._calls.append(_call(call_id, name))
                case ArgumentsDelta(index, text):
                    self._calls[index]["function"]["arguments"] += text

    def chunks(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Write what a chunk brought as a stream's choices; the last has the finish reason."""
        self.num_tokens += len(chunk.token_ids)
        self.result = chunk.result
        told = self._told(chunk)
        shown = [self._chunk(_delta(delta)) for delta in read_deltas(self._parser, chunk)]
        if told or (self._given.marks_drafts and chunk.token_ids):
            shown = shown or [self._chunk({"content": ""})]
            if self._given.logprobs:
                shown[0]["logprobs"] = {"content": told, "refusal": None}
            if self._given.marks_drafts:
                shown[0]["speculative"] = marks(chunk)
        if self._given.return_token_ids and chunk.token_ids:
            shown = shown or [self._chunk({"content": ""})]
            shown[0]["token_ids"] = list(chunk.token_ids)
        if chunk.result is not None:
            shown = shown or [self._chunk({})]
            shown[-1]["finish_reason"] = self._finish_reason(chunk.result)
            shown[-1]["stop_reason"] = stop_reason(self._service.eos_token_ids, chunk.result)
        return shown

    def whole(self) -> dict[str, Any]:
        """Write the finished answer."""
        result = self.result
        if result is None:
            raise RuntimeError("an answer ended without a result")
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if self._calls:
            message["tool_calls"] = self._calls
        choice = {
            "index": self._index,
            "message": message,
            "logprobs": (
                {"content": self._logprobs, "refusal": None} if self._given.logprobs else None
            ),
            "finish_reason": self._finish_reason(result),
            "stop_reason": stop_reason(self._service.eos_token_ids, result),
        }
        if self._given.return_token_ids:
            choice["token_ids"] = list(result.token_ids)
        if result.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._service.token_texts.prompt(result.prompt_logprobs)
        return choice

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _told(self, chunk: Chunk) -> list[dict[str, Any]]:
        if not chunk.logprobs:
            return []
        return self._service.token_texts.chat(chunk.logprobs)

    def _finish_reason(self, result: GenerationResult) -> str:
        has_calls = self._parser is not None and self._parser.num_calls and self._parser.complete
        if result.finish_reason is FinishReason.STOP and has_calls:
            return "tool_calls"
        return finish_reason(result)


def _delta(delta: Delta) -> dict[str, Any]:
    match delta:
        case ContentDelta(text):
            return {"content": text}
        case CallStarted(index, call_id, name):
            return {"tool_calls": [{"index": index, **_call(call_id, name)}]}
        case ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
