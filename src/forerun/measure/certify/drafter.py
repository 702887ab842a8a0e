"""A drafter that samples its drafts, for certificates: look-up with chances instead of certainty.

Its guess for the next token mixes what followed the last token before (newer followers weigh more)
with how often each token occurs in the request's own context. Quick and simple rather than good:
it is there so that the rules for sampled drafts have something to judge in every engine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...config import MAX_DRAFT
from ...draft.base import Abilities
from ...sampling import Stream, derive_seed, sample_from_probs, uniforms
from ...types import DraftRequest, Proposal, RequestOutcome

__all__ = ["SampledLookup"]

FOLLOWER_SHARE = 0.7  # of q; the rest is by frequency alone. All of it where nothing followed
FADING = 0.8  # weight of a follower against the next newer one
MAX_FOLLOWERS = 32  # an older one weighs under a thousandth


class SampledLookup:
    """Drafts as many tokens as each request can use, never fewer: no length is chosen by value."""

    abilities = Abilities(gives_probs=True)

    def __init__(self, vocab_size: int, seed: int, max_draft: int = MAX_DRAFT) -> None:
        """`max_draft`: the most that a request may ask for."""
        self._vocab_size = vocab_size
        self._seed = seed
        self._max_draft = max_draft
        self._contexts: dict[int, _Context] = {}

    def start(self, request: DraftRequest) -> None:
        self._contexts[request.request_id] = _Context(derive_seed(self._seed, request.request_id))

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        lengths = torch.tensor([each.max_draft for each in requests], dtype=torch.int64)
        width = max((each.max_draft for each in requests), default=0)
        if width == 0:
            return Proposal.empty(len(requests))
        assert width <= self._max_draft, "a shorter draft than asked for would break the contract"
        contexts = [self._contexts[each.request_id] for each in requests]
        for context, request in zip(contexts, requests, strict=True):
            context.extend(request.tokens)
        # Only tokens of the context can come, so they are all columns that the drawing looks at.
        columns = _pad([each.tokens for each in contexts], torch.int64)  # [B, D], rising
        origins = np.array([len(each.tokens) for each in requests], np.int64)
        seeds = np.array([context.seed for context in contexts], np.uint64)
        last = [each.tokens[-1] for each in requests]
        tokens = torch.zeros((len(requests), width), dtype=torch.int64)
        probs = torch.zeros((len(requests), width, self._vocab_size))
        for i in range(width):
            rows = [each.next_probs(token) for each, token in zip(contexts, last, strict=True)]
            q = _pad(rows, torch.float32)  # [B, D]
            noise = uniforms(seeds, origins + i, Stream.DRAFT, origins)
            drawn = columns.gather(-1, sample_from_probs(q, noise).unsqueeze(-1))
            tokens[:, i] = drawn.squeeze(-1)
            probs[:, i].scatter_add_(-1, columns, q)  # padding adds 0 to token 0
            last = tokens[:, i].tolist()
        real = torch.arange(width) < lengths.unsqueeze(-1)  # [B, K]
        return Proposal(tokens * real, lengths, probs.mul_(real.unsqueeze(-1)))

    def observe(self, outcomes: Sequence[RequestOutcome], features: Tensor | None) -> None:
        """Learn nothing here: the tokens themselves tell, when the next guess is due."""

    def finish(self, request_id: int) -> None:
        self._contexts.pop(request_id, None)


class _Context:
    """What occurs in a request's tokens, and after what."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tokens = np.zeros(0, np.int64)  # [D] that occur, rising
        self._num_seen = 0
        self._counts: Counter[int] = Counter()
        self._followers: defaultdict[int, list[int]] = defaultdict(list)  # oldest first
        self._frequency = np.zeros(0)  # [D] over `tokens`, sums to 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Catch up with what was added since the last call."""
        # with the last token seen, which may have a follower now
        for before, after in pairwise(tokens[max(self._num_seen - 1, 0) :]):
            self._followers[before].append(after)
        self._counts.update(tokens[self._num_seen :])
        self._num_seen = len(tokens)
        rising = sorted(self._counts)
        self.tokens = np.array(rising, np.int64)
        self._frequency = np.array([self._counts[token] for token in rising]) / self._num_seen

    def next_probs(self, last: int) -> NDArray[np.float64]:  # [D] over `tokens`
        """Give q after a token, from all of the context and nothing drafted."""
        recent = self._followers.get(last, [])[-MAX_FOLLOWERS:]
        if not recent:
            return self._frequency
        columns = np.searchsorted(self.tokens, recent)
        fades = FADING ** np.arange(len(recent))[::-1]  # 1 for the newest
        weights = np.bincount(columns, fades / fades.sum(), minlength=len(self.tokens))
        q: NDArray[np.float64] = FOLLOWER_SHARE * weights + (1 - FOLLOWER_SHARE) * self._frequency
        return q


def _pad(rows: Sequence[NDArray[Any]], dtype: torch.dtype) -> Tensor:
    """Stack rows, right-padded with 0: -> [B, D]."""
    padded = np.zeros((len(rows), max(len(row) for row in rows)))
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(padded).to(dtype)
