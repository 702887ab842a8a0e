"""A worker's side: JSON lines in, JSON lines out, and the clock that all peers are timed by.

Standard library only: every peer's script imports it from its own virtual environment.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

__all__ = ["Peer", "Watch", "drive_steps", "drive_streams", "serve", "versions"]

Delivery = tuple[int, list[int], bool]  # key, new tokens, whether it was the last


class Peer(Protocol):
    """A loaded model of one tool in one mode."""

    def describe(self) -> dict[str, Any]:
        """Name version, dtype, settings: whatever the reader of a figure has to know."""

    def answer(self, prompts: list[list[int]], concurrency: int, max_tokens: int) -> list[Watch]:
        """Answer the prompts greedily, so many at once, each up to end-of-text or max_tokens."""

    def close(self) -> None:
        """Let go of what would outlive the process."""


class Watch:
    """One request under the clock: when which tokens came."""

    def __init__(self) -> None:
        self.begin_s = time.perf_counter()
        self.deliveries: list[tuple[float, int]] = []  # (when, how many tokens)
        self.token_ids: list[int] = []
        self.counts: dict[str, int | None] = {"drafted": None, "accepted": None, "steps": None}

    def take(self, token_ids: Sequence[int]) -> None:
        """Note tokens that came just now."""
        if token_ids:
            self.deliveries.append((time.perf_counter(), len(token_ids)))
            self.token_ids += token_ids

    def count(self, **counts: int | None) -> None:
        """Note what the tool says of its drafts."""
        self.counts.update(counts)

    def reply(self) -> dict[str, Any]:
        """Say it all relative to the request's beginning."""
        first_s, num_first = self.deliveries[0] if self.deliveries else (self.begin_s, 0)
        last_s = self.deliveries[-1][0] if self.deliveries else self.begin_s
        return {
            "token_ids": self.token_ids,
            "ttft_s": first_s - self.begin_s,
            "total_s": last_s - self.begin_s,
            "num_first": num_first,  # tokens in the first delivery: the decode rate omits them
            **self.counts,
        }


def serve(load: Callable[[dict[str, Any]], Peer]) -> None:
    """Load a peer with the options in argv[1], say so, answer until standard input ends."""
    say = _claim_stdout()
    try:
        peer = load(json.loads(sys.argv[1]))
        say({"ready": True, "python": sys.version.split()[0], **peer.describe()})
    except Exception as error:  # a tool may fail in any way: why is the answer
        say({"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error
    try:
        for line in sys.stdin:
            say(_reply(peer, json.loads(line)))
    finally:
        peer.close()


def versions(*packages: str) -> dict[str, str | None]:
    """Look up what is installed beside this worker."""
    return {name: _version(name) for name in packages}


def drive_steps(
    submit: Callable[[int, list[int]], None],
    step: Callable[[], Iterable[Delivery]],
    prompts: Sequence[list[int]],
    concurrency: int,
) -> list[Watch]:
    """Keep `concurrency` requests in a tool that is stepped by its caller, until all are done."""
    waiting, watches, active = deque(prompts), [], {}
    while waiting or active:
        while waiting and len(active) < concurrency:
            key = next(_KEYS)
            active[key] = Watch()
            watches.append(active[key])
            submit(key, waiting.popleft())
        for key, token_ids, is_last in step():
            active[key].take(token_ids)
            if is_last:
                del active[key]
    return watches


def drive_streams(
    stream: Callable[[list[int], Watch], None], prompts: Sequence[list[int]], concurrency: int
) -> list[Watch]:
    """Keep `concurrency` requests in a tool that is asked by threads, until all are done."""
    if concurrency == 1:
        return [_stream_one(stream, prompt) for prompt in prompts]
    waiting: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)
    done: list[Watch] = []
    errors: list[BaseException] = []

    def work() -> None:
        for prompt in _drain(waiting):
            try:
                done.append(_stream_one(stream, prompt))
            except BaseException as error:  # noqa: BLE001 - raised again where it can be told
                errors.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return done


_KEYS = itertools.count()  # of requests: a tool may remember those of earlier blocks


def _stream_one(stream: Callable[[list[int], Watch], None], prompt: list[int]) -> Watch:
    watch = Watch()
    stream(prompt, watch)
    return watch


def _drain(waiting: queue.SimpleQueue[list[int]]) -> Iterator[list[int]]:
    while True:
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return


def _reply(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    begin_s = time.perf_counter()
    try:
        if "prompt_ids" in request:
            (watch,) = peer.answer([request["prompt_ids"]], 1, request["max_tokens"])
            return watch.reply()
        watches = peer.answer(request["prompts"], request["concurrency"], request["max_tokens"])
        return _load_reply(watches, begin_s)
    except Exception as error:  # noqa: BLE001 - the next request may go well
        return {"error": f"{type(error).__name__}: {error}"}


def _load_reply(watches: Sequence[Watch], begin_s: float) -> dict[str, Any]:
    """Sum up a block. `steady`: as long as nobody waited for a request that was not there."""
    deliveries = [each for watch in watches for each in watch.deliveries]
    last_start_s = max(watch.begin_s for watch in watches)
    return {
        "num_requests": len(watches),
        "num_tokens": sum(count for _, count in deliveries),
        "total_s": max(when for when, _ in deliveries) - begin_s,
        "steady_tokens": sum(count for when, count in deliveries if when <= last_start_s),
        "steady_s": last_start_s - begin_s,
        "ttfts_s": [watch.reply()["ttft_s"] for watch in watches],
    }


def _claim_stdout() -> Callable[[dict[str, Any]], None]:
    """Keep standard output for the protocol; what a tool prints goes to standard error."""
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        own.write(json.dumps(message) + "\n")
        own.flush()

    return say


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
