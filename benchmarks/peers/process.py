"""A contestant's process as the benchmark sees it: started, asked, watched, ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Worker", "WorkerFailed", "close_all", "machine_cpu_s"]

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
END_S = 30.0  # between asking a worker to end and making it


class WorkerFailed(Exception):
    """Why a worker did not start, or did not answer."""


class Worker:
    """One worker: JSON lines through its pipes, what it prints in a log."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        start_timeout_s: float,
    ) -> None:
        self._log = log
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        with log.open("w") as log_file:
            self._process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log_file, text=True, start_new_session=True,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.hello = self._receive(start_timeout_s)  # what the worker says of itself
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises:
            WorkerFailed: the worker says so, has ended, or takes too long.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(self._obituary()) from None
        return self._receive(timeout_s)

    def cpu_s(self) -> float:
        """Add up the processor seconds of the worker and what it started."""
        return sum(_cpu_s(pid) for pid in _family(self._process.pid))

    def peak_rss_bytes(self) -> int:
        """Add up peak resident sizes; pages that processes share count for each."""
        return sum(_peak_rss_bytes(pid) for pid in _family(self._process.pid))

    def hang_up(self) -> None:
        """Ask the worker to end, without waiting for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """End the worker and whatever it started."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own group, see start_new_session
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._replies.put(line)
        self._replies.put("")  # nothing more will come

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            raise WorkerFailed(f"no answer within {timeout_s:.0f} s") from None
        if not line:
            raise WorkerFailed(self._obituary())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(reply["error"])
        return reply

    def _obituary(self) -> str:
        """Say how the process ended, and its last words."""
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        lines = [
            line for line in self._log.read_text(errors="replace").splitlines() if line.strip()
        ]
        last = f": {lines[-1].strip()}" if lines else ""
        return f"ended with {how}{last}"


def close_all(workers: Iterable[Worker]) -> None:
    """End several workers, which take their time side by side."""
    remaining = list(workers)
    for worker in remaining:
        worker.hang_up()
    for worker in remaining:
        worker.close()


def machine_cpu_s() -> float:
    """Read how many processor seconds the whole machine has worked, stolen ones included."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_guest = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / CLOCK_TICKS


def _family(pid: int) -> list[int]:
    """List a process and its descendants, as far as they still live."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                found += map(int, children.read_text().split())
    return found


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS  # user and system time


def _peak_rss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return 0
