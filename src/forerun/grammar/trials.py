"""A few processes that try constraints before anybody compiles them here; `trial.py` is one."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidConstraint, Overloaded
from .limits import GrammarLimits

__all__ = ["Trials", "VocabularyData"]

START_S = 60.0  # for a process to import and read the vocabulary; a busy machine takes seconds
MAX_REPLY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class VocabularyData:
    """What a compiler has to know of a tokenizer."""

    tokens: list[bytes]  # by id; no bytes: the id stands for nothing
    special_ids: list[int]  # never part of a text
    eos_ids: list[int]  # at least one


class Trials:
    """Try grammars, at most `num_workers` at a time; thread-safe. Processes start when needed."""

    def __init__(self, vocabulary: VocabularyData, limits: GrammarLimits) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._places: queue.LifoQueue[_Trial | None] = queue.LifoQueue()
        for _ in range(limits.num_workers):
            self._places.put(None)
        self._finalizer = weakref.finalize(self, _stop_all, self._places, limits.num_workers)

    def run(self, lark: str) -> int:
        """Compile a grammar elsewhere and return the bytes that it took.

        Raises:
            InvalidConstraint: it is wrong, nothing can be said, or it takes too much.
            Overloaded: all workers are busy for longer than one constraint may take.
        """
        limits = self._limits
        try:
            trial = self._places.get(timeout=limits.compile_s)
        except queue.Empty:
            raise Overloaded(
                f"{limits.num_workers} constraints are being compiled, and none was done within "
                f"{limits.compile_s:g} s; try again later",
                retry_after_s=limits.compile_s,
            ) from None
        try:
            if trial is None or not trial.alive:
                trial = _Trial(self._vocabulary, limits)
            return trial.run(lark, limits)
        finally:
            self._places.put(trial)

    def close(self) -> None:
        """End the processes that are idle; one at work goes on until its constraint is done."""
        _stop_all(self._places, self._limits.num_workers)


def _stop_all(places: queue.LifoQueue[_Trial | None], num_workers: int) -> None:
    idle: list[_Trial | None] = []
    with contextlib.suppress(queue.Empty):
        idle.extend(places.get_nowait() for _ in range(num_workers))
    for trial in idle:
        if trial is not None:
            trial.stop()
        places.put(None)


class _Trial:
    """One process and the pipe to it."""

    def __init__(self, vocabulary: VocabularyData, limits: GrammarLimits) -> None:
        package = Path(__file__).resolve().parents[2]
        paths = [str(package), os.environ.get("PYTHONPATH", "")]
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forerun.grammar.trial", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        setup = {
            "tokens": [token.hex() for token in vocabulary.tokens],
            "special_ids": vocabulary.special_ids,
            "eos_ids": vocabulary.eos_ids,
            "memory_bytes": limits.memory_bytes,
            "compile_s": limits.compile_s,
        }
        try:
            self._pipe.send_bytes(json.dumps(setup).encode())
            ready = self._pipe.poll(START_S) and self._pipe.recv_bytes(MAX_REPLY_BYTES)
        except (EOFError, OSError):
            ready = False
        if not ready:
            self.stop()
            raise Overloaded(
                "no process to try a constraint in could be started; try again later",
                retry_after_s=START_S,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, lark: str, limits: GrammarLimits) -> int:
        try:
            self._pipe.send_bytes(lark.encode())
            if not self._pipe.poll(limits.compile_s):
                self.stop()
                raise InvalidConstraint(
                    f"the constraint takes more than {limits.compile_s:g} s to compile; "
                    "make it simpler: fewer alternatives, properties and counted repetitions"
                )
            reply = json.loads(self._pipe.recv_bytes(MAX_REPLY_BYTES))
        except (EOFError, OSError):
            self.stop()
            raise InvalidConstraint(
                "the constraint is nested too deeply, or takes more than "
                f"{limits.memory_bytes >> 20} MiB to compile; make it simpler"
            ) from None
        if reply["error"] is not None:
            raise InvalidConstraint(str(reply["error"]))
        return int(reply["bytes"])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def _environment() -> dict[str, str]:
    """What a trial is told of our surroundings: nothing of what is ours, keys above all."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FORERUN_")}
