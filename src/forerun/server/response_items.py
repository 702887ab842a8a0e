"""The output items of a response, as they grow: a message, then calls; each with its events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from ..engine.results import Chunk, GenerationResult
from ..types import FinishReason
from .reading import read_deltas
from .tools import ArgumentsDelta, CallStarted, ContentDelta, ToolCallParser

__all__ = ["Items"]

Event = tuple[str, dict[str, Any]]


class Items:
    """What a response has said so far."""

    def __init__(self, parser: ToolCallParser | None) -> None:
        self._parser = parser
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item still grows
        self.result: GenerationResult | None = None

    def read(self, chunk: Chunk) -> list[Event]:
        """Take a chunk; say what it means as events."""
        return list(self._read(chunk))

    def whole(self) -> list[dict[str, Any]]:
        """List the items."""
        return self._items

    def _read(self, chunk: Chunk) -> Iterator[Event]:
        for delta in read_deltas(self._parser, chunk):
            match delta:
                case ContentDelta(text):
                    yield from self._say(text)
                case CallStarted(_, call_id, name):
                    yield from self._close()
                    yield self._add(
                        {
                            "id": f"fc_{secrets.token_hex(12)}",
                            "type": "function_call",
                            "status": "in_progress",
                            "call_id": call_id,
                            "name": name,
                            "arguments": "",
                        }
                    )
                case ArgumentsDelta(_, text):
                    item = self._items[-1]
                    item["arguments"] += text
                    yield (
                        "response.function_call_arguments.delta",
                        {"item_id": item["id"], **self._place(), "delta": text},
                    )
        self.result = chunk.result
        if chunk.result is not None:
            cut = chunk.result.finish_reason is FinishReason.LENGTH
            yield from self._close("incomplete" if cut else "completed")

    def _say(self, text: str) -> Iterator[Event]:
        if not self._is_open or self._items[-1]["type"] != "message":
            yield from self._close()
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            item: dict[str, Any] = {
                "id": f"msg_{secrets.token_hex(12)}",
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            yield self._add(item)
            item["content"] = [part]
            where: dict[str, Any] = {"item_id": item["id"], **self._place(), "content_index": 0}
            yield "response.content_part.added", {**where, "part": dict(part)}
        item = self._items[-1]
        item["content"][0]["text"] += text
        place = {"item_id": item["id"], **self._place(), "content_index": 0}
        yield "response.output_text.delta", {**place, "delta": text, "logprobs": []}

    def _add(self, item: dict[str, Any]) -> Event:
        self._items.append(item)
        self._is_open = True
        return "response.output_item.added", {**self._place(), "item": dict(item)}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        where = {"item_id": item["id"], **self._place()}
        if item["type"] == "message":
            part = item["content"][0]
            where["content_index"] = 0
            yield "response.output_text.done", {**where, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**where, "part": part}
        else:
            yield (
                "response.function_call_arguments.done",
                {**where, "name": item["name"], "arguments": item["arguments"]},
            )
        yield "response.output_item.done", {**self._place(), "item": item}

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._items) - 1}
