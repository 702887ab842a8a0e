"""Playing a drafter back over known texts, on a clock of its own; and a fake that has a price."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from forerun.draft.base import Abilities, Drafter
from forerun.params import SamplingParams
from forerun.types import DraftRequest, FeatureSpec, Proposal, RequestOutcome

GREEDY = SamplingParams(temperature=0)
VOCABULARY = 1000


class Clock:
    """Stands still unless somebody says that time went by."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Seer:
    """Knows texts, guesses the next tokens right at a given rate, and takes its time over it.

    The same place is always guessed alike.
    """

    def __init__(
        self,
        texts: dict[int, Sequence[int]],
        clock: Clock,
        *,
        rate: float = 1.0,
        call_s: float = 0.0,
        count: int = 4,
        cost_class: str = "pass",
        sampled: bool = False,
        features: FeatureSpec | None = None,
    ) -> None:
        self.abilities = Abilities(
            method="seer", cost_class=cost_class, gives_probs=sampled, features=features
        )
        self.texts, self.rate, self.call_s, self.count = texts, rate, call_s, count
        self.sampled = sampled
        self.calls: list[list[int]] = []  # whose guesses each call was for
        self.alive: set[int] = set()
        self.heard: list[RequestOutcome] = []
        self.features: list[object] = []
        self._clock = clock

    def start(self, request: DraftRequest) -> None:
        self.alive.add(request.request_id)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        self._clock.now_s += self.call_s
        self.calls.append([each.request_id for each in requests])
        drafts = [self._guess(each) for each in requests]
        proposal = Proposal.from_lists(drafts)
        if not self.sampled:
            return proposal
        probs = torch.zeros((*proposal.tokens.shape, VOCABULARY))
        for row, draft in zip(probs, drafts, strict=True):
            row[range(len(draft)), draft] = 1.0
        return Proposal(proposal.tokens, proposal.lengths, probs)

    def observe(self, outcomes: Sequence[RequestOutcome], features: object) -> None:
        self.heard.extend(outcomes)
        self.features.append(features)

    def finish(self, request_id: int) -> None:
        self.alive.remove(request_id)

    def _guess(self, request: DraftRequest) -> list[int]:
        text, begin = self.texts[request.request_id], len(request.tokens)
        count = request.max_draft if self.sampled else min(self.count, request.max_draft)
        draft = []
        for place in range(begin, begin + count):
            dice = zlib.crc32(f"{request.request_id} {begin} {place}".encode()) / 2**32
            known = place < len(text) and dice < self.rate
            draft.append(text[place] if known else VOCABULARY - 1)
        return draft


class Player:
    """Has a drafter guess along known answers, as the engine would, and adds up what it costs."""

    def __init__(
        self,
        drafter: Drafter,
        clock: Clock,
        *,
        row_cost: float = 0.02,
        max_draft: int = 8,
        params: SamplingParams = GREEDY,
        takes_trees: bool = False,
    ) -> None:
        self.drafter, self.params = drafter, params
        self.methods: list[str] = []
        self.drafts: list[list[int]] = []
        self.num_tokens = 0
        self.passes = 0.0  # in passes over one row, drafting included
        self._clock, self._row_cost, self._max_draft = clock, row_cost, max_draft
        self._takes_trees = takes_trees

    @property
    def rate(self) -> float:
        """Tokens for each pass over one row."""
        return self.num_tokens / self.passes

    def play(self, request_id: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Play one request alone."""
        tokens = list(prompt)
        self.drafter.start(self._view(request_id, tokens, 0))
        place = 0
        while place < len(answer):
            begin_s = self._clock()
            most = min(self._max_draft, len(answer) - place - 1)
            proposal = self.drafter.propose([self._view(request_id, tokens, most)])
            length = int(proposal.lengths[0])
            draft = proposal.tokens[0, :length].tolist()
            parents = list(range(length))
            if proposal.parents is not None:
                parents = proposal.parents[0, :length].tolist()
            kept = _kept(draft, parents, answer[place:])
            emitted = tuple(answer[place : place + kept + 1])
            place += len(emitted)
            tokens.extend(emitted)
            method = "?" if proposal.methods is None else proposal.methods[0]
            self.methods.append(method)
            self.drafts.append(draft)
            self.num_tokens += len(emitted)
            self.passes += 1 + self._row_cost * length + self._clock() - begin_s
            outcome = RequestOutcome(
                request_id, length, kept, emitted, place == len(answer), method
            )
            self.drafter.observe([outcome], None)
        self.drafter.finish(request_id)

    def _view(self, request_id: int, tokens: list[int], most: int) -> DraftRequest:
        return DraftRequest(
            request_id,
            tokens,
            most,
            row_cost=self._row_cost,
            pass_s=1.0,
            takes_trees=self._takes_trees,
            params=self.params,
        )


def _kept(draft: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> int:
    nodes = {pair: node for node, pair in enumerate(zip(parents, draft, strict=True), 1)}
    node = 0
    for count, token in enumerate(text):
        node = nodes.get((node, token), 0)
        if not node:
            return count
    return len(text)
