"""The process in which constraints are tried first: if one kills it, nothing else dies.

Compiling has bounds of its own, yet some inputs get past them: a long chain of references
overflows the stack, `"multipleOf": 99999989` takes gigabytes, a few patterns take minutes. A
thread cannot be stopped, a process can. Run as a module by `trials.py`, which says what it sends.
"""

from __future__ import annotations

import json
import math
import random
import resource
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from .matching import error_of, make_matcher, make_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# A quarter of what threads get by default: what is compiled here fits anywhere.
STACK_BYTES = 2 * 1024**2
NUM_STEPS = 24  # tokens of a random text, to see what steps cost
MAX_STEP_S = 1.0
NO_TOKEN = "NoExtensionBias"  # the library's whole message for a grammar that allows nothing
WARM_UP = 'start: %json {"type": "object"}'  # so that its first memory is not the first trial's


def main() -> None:
    """Serve trials until the pipe is closed."""
    pipe = Connection(int(sys.argv[1]))
    setup = json.loads(pipe.recv_bytes())
    tokens = [bytes.fromhex(token) for token in setup["tokens"]]
    tokenizer = make_tokenizer(tokens, setup["special_ids"], setup["eos_ids"])
    memory_bytes, compile_s = setup["memory_bytes"], setup["compile_s"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bound = _memory("size") + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    threading.stack_size(STACK_BYTES)
    server = threading.Thread(target=_serve, args=(pipe, tokenizer, compile_s))
    server.start()
    server.join()


def _serve(pipe: Connection, tokenizer: LLTokenizer, compile_s: float) -> None:
    _try(tokenizer, WARM_UP)
    pipe.send_bytes(b"{}")  # ready
    while True:
        try:
            lark = pipe.recv_bytes().decode()
        except (EOFError, OSError):
            return
        # Whoever asked stops us when time is up. If they are gone by then, the system does.
        spent = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = math.ceil(spent.ru_utime + spent.ru_stime + 2 * compile_s + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
        pipe.send_bytes(json.dumps(_try(tokenizer, lark)).encode())


def _try(tokenizer: LLTokenizer, lark: str) -> dict[str, object]:
    before = _memory("resident")
    matcher = make_matcher(tokenizer, lark)
    error = error_of(matcher)
    if error is None:
        error = _probe(matcher.deep_copy())
    return {"error": error, "bytes": max(0, _memory("resident") - before)}


def _probe(matcher: LLMatcher) -> str | None:
    """Write a random text; say what is wrong with its start, or with the time that it takes."""
    noise = random.Random(0)
    for step in range(NUM_STEPS):
        started = time.monotonic()
        mask = matcher.compute_bitmask()
        if time.monotonic() - started > MAX_STEP_S:
            return f"one step takes more than {MAX_STEP_S:g} s"
        if matcher.is_error():
            if step > 0:
                return None  # this text cannot go on, others may
            error = error_of(matcher)
            return "nothing can be said that satisfies it" if error == NO_TOKEN else error
        start = noise.randrange(len(mask))
        place = next(i % len(mask) for i in range(start, start + len(mask)) if mask[i % len(mask)])
        bits = [bit for bit in range(8) if mask[place] >> bit & 1]
        if not matcher.consume_token(8 * place + noise.choice(bits)) or matcher.is_stopped():
            return None
    return None


def _memory(kind: str) -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[("size", "resident").index(kind)]) * resource.getpagesize()


if __name__ == "__main__":
    main()
