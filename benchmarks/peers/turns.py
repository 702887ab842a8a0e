"""Whose turn it is: everybody once a prompt, in an order that rotates, one at a time.

A machine that becomes slower or faster meanwhile does so for everybody alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from .process import Worker, WorkerFailed, machine_cpu_s
from .summary import Block, PromptIds, Run

__all__ = ["answer_in_turn", "idle_shares", "load_in_turn", "rotated", "without_end"]

Item = TypeVar("Item")
Report = Callable[[str], None]
ANSWER_TIMEOUT_S = 600.0
BLOCK_TIMEOUT_S = 1800.0


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """Begin with the next item each turn: abc, bca, cab, abc, ..."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]


def answer_in_turn(
    workers: dict[str, Worker],
    prompts: Sequence[PromptIds],
    num_rounds: int,
    max_tokens: int,
    eos_ids: Sequence[int],
    settle_s: float,
    report: Report,
    failures: dict[str, str],
) -> Iterator[Run]:
    """Ask everybody every prompt, round after round. Whoever fails is out, with the reason."""
    names = list(workers)
    for number in range(1, num_rounds + 1):
        for place, prompt in enumerate(prompts):
            request = {"prompt_ids": list(prompt.token_ids), "max_tokens": max_tokens}
            for name in rotated(names, place + number):
                reply = _ask(workers, name, request, ANSWER_TIMEOUT_S, settle_s, failures)
                if reply is not None:
                    yield _run(name, prompt, number, reply, eos_ids)
            report(f"round {number} of {num_rounds}, prompt {prompt.number} ({prompt.group})")


def load_in_turn(
    workers: dict[str, Worker],
    prompts: Sequence[PromptIds],
    levels: Sequence[int],
    num_rounds: int,
    requests_per_slot: int,
    max_tokens: int,
    settle_s: float,
    report: Report,
    failures: dict[str, str],
) -> Iterator[Block]:
    """Give everybody a block of requests at each level, round after round, the same to all."""
    names = list(workers)
    for number in range(1, num_rounds + 1):
        for place, concurrency in enumerate(levels):
            size = concurrency * requests_per_slot
            begin = (number - 1) * size
            chosen = [prompts[(begin + i) % len(prompts)].token_ids for i in range(size)]
            request = {
                "prompts": list(map(list, chosen)),
                "concurrency": concurrency,
                "max_tokens": max_tokens,
            }
            for name in rotated(names, place + number):
                reply = _ask(workers, name, request, BLOCK_TIMEOUT_S, settle_s, failures)
                if reply is not None:
                    ttfts = tuple(reply.pop("ttfts_s"))
                    yield Block(name, concurrency, number, ttfts_s=ttfts, **reply)
                    tps = reply["num_tokens"] / reply["total_s"]
                    report(f"round {number}, {concurrency} at once, {name}: {tps:.1f} tokens/s")


def idle_shares(workers: Mapping[str, Worker], seconds: float) -> dict[str, float]:
    """Measure how much of a processor each worker takes while nobody asks it anything."""
    before = {name: worker.cpu_s() for name, worker in workers.items()}
    begin_s = time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - begin_s
    return {name: (worker.cpu_s() - before[name]) / passed_s for name, worker in workers.items()}


def without_end(token_ids: Sequence[int], eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Drop a final end-of-text: some tools count it to the answer, some do not."""
    kept = token_ids[:-1] if token_ids and token_ids[-1] in eos_ids else token_ids
    return tuple(kept)


def _ask(
    workers: dict[str, Worker],
    name: str,
    request: Mapping[str, Any],
    timeout_s: float,
    settle_s: float,
    failures: dict[str, str],
) -> dict[str, Any] | None:
    if name not in workers:
        return None
    worker = workers[name]
    time.sleep(settle_s)  # threads of whoever was asked before spin a moment before they sleep
    begin_s, others_s = time.monotonic(), machine_cpu_s() - worker.cpu_s()
    try:
        reply = worker.ask(request, timeout_s)
    except WorkerFailed as error:
        failures[name] = str(error)
        workers.pop(name).close()
        return None
    others_s = machine_cpu_s() - worker.cpu_s() - others_s
    return reply | {"others_share": max(0.0, others_s / (time.monotonic() - begin_s))}


def _run(
    name: str, prompt: PromptIds, number: int, reply: Mapping[str, Any], eos_ids: Sequence[int]
) -> Run:
    counts = {key: reply[key] for key in ("drafted", "accepted", "steps", "others_share")}
    return Run(
        contestant=name,
        prompt=prompt.number,
        group=prompt.group,
        round_number=number,
        num_tokens=len(reply["token_ids"]),
        num_first=reply["num_first"],
        token_ids=without_end(reply["token_ids"], eos_ids),
        ttft_s=reply["ttft_s"],
        total_s=reply["total_s"],
        **counts,
    )
