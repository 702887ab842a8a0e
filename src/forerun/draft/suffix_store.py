"""What requests were answered, kept for a while for later requests of the same tenant.

Who sees what. Which drafts are accepted shows in the time an answer takes, so whoever shares a
store could find out by trying what others were answered. Therefore each tenant (the `cache_salt`
of its requests; the server puts the API key into it) has a tree of its own, and no text of one is
counted for another. Requests without a salt have no known owner: they keep and see nothing unless
the operator says (`shared`) that all of them may share one store. Only outputs are kept, in memory,
up to an age. All that a tenant can notice of another is that its own texts go sooner.

What fits. All tenants together keep at most so many tokens (about half a kB of memory each). Where
room is wanted, the tenant with the most tokens gives up its oldest output: whoever fills the store
pushes out itself, and nobody below an equal share. Whoever may choose salts freely is many tenants.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .suffix_forget import ForgettingTree

__all__ = ["SuffixStore"]

MAX_TENANTS = 1024  # each has a tree, however little is in it
LONGEST_PART = 4  # of an output longer than this part of the store the beginning is kept
EXPIRED_AT_ONCE = 4096  # tokens: how long a step is held up by what has become too old


@dataclass(frozen=True, slots=True)
class _Output:
    number: int
    length: int
    ended_s: float


@dataclass(slots=True)
class _Tenant:
    tree: ForgettingTree = field(default_factory=ForgettingTree)
    outputs: deque[_Output] = field(default_factory=deque)  # oldest first, as in the tree
    num_tokens: int = 0


class SuffixStore:
    """A bounded store of past outputs, apart for each tenant."""

    def __init__(
        self,
        max_tokens: int,
        max_age_s: float,
        *,
        shared: bool = False,  # whether requests without a salt share a store
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_age_s = max_age_s
        self._shared = shared
        self._clock = clock
        self._numbers = itertools.count()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # who kept something last is last
        self._owners: OrderedDict[int, str] = OrderedDict()  # of all outputs, oldest first
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def tree(self, salt: str) -> ForgettingTree | None:
        """Look up what requests of a salt may draft from; None: nothing."""
        self._expire()
        tenant = self._tenants.get(salt)
        # Taking out much that is too old takes several steps; until then none of it is shown.
        return None if tenant is None or self._is_old(tenant.outputs[0]) else tenant.tree

    def add(self, salt: str, output: Sequence[int]) -> None:
        """Keep the output of a request that ended."""
        self._expire()
        output = output[: self._max_tokens // LONGEST_PART]
        if len(output) < 2 or not (salt or self._shared):  # one token has no follower
            return
        self._make_room(salt, len(output))
        kept = _Output(next(self._numbers), len(output), self._clock())
        tenant = self._tenants.setdefault(salt, _Tenant())
        self._tenants.move_to_end(salt)
        self._owners[kept.number] = salt
        tenant.tree.add(output)
        tenant.outputs.append(kept)
        tenant.num_tokens += kept.length
        self._num_tokens += kept.length

    def _make_room(self, salt: str, count: int) -> None:
        """Take out what must go for `count` more tokens of a salt."""
        if salt not in self._tenants and len(self._tenants) == MAX_TENANTS:
            self._drop(next(iter(self._tenants)))
        while self._num_tokens + count > self._max_tokens:
            sizes = {key: tenant.num_tokens for key, tenant in self._tenants.items()}
            if salt in sizes:
                sizes[salt] += count
            self._forget(max(sizes, key=sizes.__getitem__))

    def _expire(self) -> None:
        """Take out what is too old, in several calls if it is much."""
        target = self._num_tokens - EXPIRED_AT_ONCE
        while self._owners and self._num_tokens > target:
            salt = next(iter(self._owners.values()))
            outputs = self._tenants[salt].outputs
            if self._is_old(outputs[-1]):
                self._drop(salt)
            elif self._is_old(outputs[0]):
                self._forget(salt)
            else:
                return

    def _is_old(self, output: _Output) -> bool:
        return self._clock() - output.ended_s > self._max_age_s

    def _forget(self, salt: str) -> None:
        """Take out a tenant's oldest output."""
        tenant = self._tenants[salt]
        if len(tenant.outputs) == 1:
            self._drop(salt)
            return
        tenant.tree.forget()
        gone = tenant.outputs.popleft()
        del self._owners[gone.number]
        tenant.num_tokens -= gone.length
        self._num_tokens -= gone.length

    def _drop(self, salt: str) -> None:
        """Take out all that a tenant has."""
        tenant = self._tenants.pop(salt)
        for output in tenant.outputs:
            del self._owners[output.number]
        self._num_tokens -= tenant.num_tokens
