"""A drafter that samples: what rules for sampled drafts are certified with.

Its guesses follow the last token's earlier continuations in the request's own text, smoothed by how
often tokens stand in it at all. Not meant to be fast or often right: it is partly right, and its
probabilities are exactly those that it draws from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...draft.base import Abilities
from ...sampling import Stream, derive_seed, sample_from_probs, uniforms
from ...types import DraftRequest, Proposal, RequestOutcome

__all__ = ["SampledLookup"]

SHARE = 0.7  # of continuations; the rest goes to all tokens of the text


class SampledLookup:
    """Draws every draft token from a distribution that it states, at the length that is asked."""

    abilities = Abilities(gives_probs=True)

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed

    def start(self, request: DraftRequest) -> None:
        """Keep nothing."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        width = max((each.max_draft for each in requests), default=0)
        tokens = torch.zeros((len(requests), width), dtype=torch.int64)
        probs = torch.zeros((len(requests), width, self._vocab_size))
        for row, request in enumerate(requests):
            text = list(request.tokens)
            origin = len(text)
            for place in range(request.max_draft):
                # The length was fixed by the engine: nothing here may end it for what was drawn.
                probs[row, place] = self._guess(text)
                drawn = self._draw(probs[row, place], request.request_id, len(text), origin)
                tokens[row, place] = drawn
                text.append(drawn)
        lengths = torch.tensor([each.max_draft for each in requests], dtype=torch.int64)
        return Proposal(tokens, lengths, probs)

    def observe(self, outcomes: Sequence[RequestOutcome], features: Tensor | None) -> None:
        """Learn nothing."""

    def finish(self, request_id: int) -> None:
        """Drop nothing."""

    def _guess(self, text: Sequence[int]) -> Tensor:  # -> [V]
        ids = torch.tensor(text)
        common = torch.bincount(ids, minlength=self._vocab_size).float()
        after = ids[1:][ids[:-1] == ids[-1]]
        if len(after) == 0:
            return common / common.sum()
        likely = torch.bincount(after, minlength=self._vocab_size).float()
        return SHARE * likely / likely.sum() + (1 - SHARE) * common / common.sum()

    def _draw(self, probs: Tensor, request_id: int, position: int, origin: int) -> int:
        seed = np.array([derive_seed(self._seed, request_id + 1)], np.uint64)
        noise = uniforms(seed, np.array([position]), Stream.DRAFT, np.array([origin]))
        return int(sample_from_probs(probs.unsqueeze(0), noise))
