"""Threads that take part in compiled work: woken for it, asleep in between.

They are Python's own threads, and what they run gives the interpreter back. A parallel section of
OpenMP's or numba's pool would do the same, but its threads stay awake for a millisecond after each
section, on processors that others want, and it wants a second compilation of all that it runs.
Work is shared by counters (`team`): a thread that wakes late finds less to do, and nobody waits
for it.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["Workers", "shared_workers"]

logger = logging.getLogger(__name__)

_Job = tuple[Callable[..., None], tuple[Any, ...]] | None


class Workers:
    """The calling thread and `num_threads` - 1 others.

    Several callers may have work at once: each does its own, and gets what help is free.
    """

    def __init__(self, num_threads: int) -> None:
        self._mailboxes = [_hire(number) for number in range(1, num_threads)]
        self._end = weakref.finalize(self, _dismiss, self._mailboxes)

    def run(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """Have everybody call `kernel(*arguments)`; back when the caller's own call is.

        The kernel must share its work by counters of its own and return only when all is done.
        """
        for mailbox in self._mailboxes:
            mailbox.put((kernel, arguments))
        kernel(*arguments)


@functools.cache
def shared_workers(num_threads: int) -> Workers:
    """Give the process's workers of this number: threads are the process's, whoever uses them."""
    return Workers(num_threads)


def _hire(number: int) -> SimpleQueue[_Job]:
    mailbox: SimpleQueue[_Job] = SimpleQueue()
    threading.Thread(
        target=_work, args=(mailbox,), name=f"forerun-worker-{number}", daemon=True
    ).start()
    return mailbox


def _work(mailbox: SimpleQueue[_Job]) -> None:
    while (job := mailbox.get()) is not None:
        kernel, arguments = job
        try:
            kernel(*arguments)
        except Exception:
            # Only memory can fail here. The caller may wait for a part of ours: let it be known.
            logger.exception("a worker thread failed in %s", getattr(kernel, "__name__", kernel))
        del job, kernel, arguments  # else the last pass's arrays live until the next one


def _dismiss(mailboxes: list[SimpleQueue[_Job]]) -> None:
    for mailbox in mailboxes:
        mailbox.put(None)
    mailboxes.clear()
