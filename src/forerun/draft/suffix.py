"""Suffix look-up: guess what followed the newest tokens most often, as far as that is likely.

Prompt look-up copies the latest place that looks alike. Here every place counts: a tree holds what
followed each run of up to `DEPTH` tokens and how often, so a continuation that was always the same
is followed far, and one that came out differently each time is not followed at all (SuffixDecoding,
2411.04975). Beside the request's own tokens the outputs of earlier requests may count, where there
is a store of them. A step costs the same at any context length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..types import DraftRequest, Features, Proposal, RequestOutcome
from .base import Abilities
from .candid import Guess
from .suffix_store import SuffixStore
from .suffix_tree import DEPTH, SuffixTree

__all__ = ["Evidence", "SuffixDrafter", "follow"]

# How likely the likeliest next token is, fitted on verified text (docs/notes.md): seen c times of
# N behind a run of n tokens, c / (N + DOUBT / n ** SURENESS).
DOUBT = 2.0
SURENESS = 1.25
STORE_WEIGHT = 0.25  # what one occurrence in a past output counts; one in the own text counts 1
RATE = 1.5  # tokens of a pass: a row that costs c of a pass must bring at least c x this many
LEAST = (
    0.06  # less likely than this nothing is drafted, however cheap: being wrong costs a cache row
)
LEAST_SAID = 0.02  # what is less likely is not told to who chooses among drafters


@dataclass(frozen=True, slots=True)
class Evidence:
    """Texts, and what an occurrence in them counts."""

    tree: SuffixTree
    weight: float = 1.0


@dataclass(slots=True)
class _Seen:
    """What is known of a request."""

    tokens: Sequence[int]  # grows
    num_prompt: int
    salt: str
    tree: SuffixTree = field(default_factory=SuffixTree)
    num_indexed: int = 0


class SuffixDrafter:
    """The likeliest continuation of each request's own tokens, and of its tenant's past outputs."""

    abilities = Abilities(method="suffix")

    def __init__(self, store: SuffixStore | None = None) -> None:
        self._store = store
        self._requests: dict[int, _Seen] = {}

    def start(self, request: DraftRequest) -> None:
        self._requests[request.request_id] = _Seen(
            request.tokens, len(request.tokens), request.params.cache_salt
        )

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        return Proposal.from_lists([self._guess(request) for request in requests])

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        """Learn nothing here: the tokens themselves tell, when the next guess is due."""

    def finish(self, request_id: int) -> None:
        seen = self._requests.pop(request_id, None)
        if seen is not None and self._store is not None:
            self._store.add(seen.salt, seen.tokens[seen.num_prompt :])

    def guess_with_chances(self, request: DraftRequest) -> Guess:
        """Guess down to the least likely token, and say how likely each is (`candid`)."""
        tokens, chances, holds = [], [], 1.0
        for token, likely in self._follow(request, max(LEAST_SAID, request.row_cost / 2)):
            tokens.append(token)
            chances.append(likely / holds)
            holds = likely
        return Guess(tokens, chances=chances)

    def _guess(self, request: DraftRequest) -> list[int]:
        least = max(LEAST, RATE * request.row_cost)
        return [token for token, _ in self._follow(request, least)]

    def _follow(self, request: DraftRequest, least: float) -> Iterator[tuple[int, float]]:
        if request.max_draft == 0:
            return iter(())
        seen = self._requests[request.request_id]
        seen.tree.extend(request.tokens[seen.num_indexed :])
        seen.num_indexed = len(request.tokens)
        evidence = [Evidence(seen.tree)]
        kept = None if self._store is None else self._store.tree(seen.salt)
        if kept is not None:
            evidence.append(Evidence(kept, STORE_WEIGHT))
        return follow(evidence, request.tokens[-DEPTH:], request.max_draft, least)


def follow(
    evidence: Sequence[Evidence], tokens: Sequence[int], most: int, least: float
) -> Iterator[tuple[int, float]]:
    """Continue tokens as is likeliest, while it is more likely than `least` to hold so far.

    Yields each token with how likely the draft is to hold up to it. The longest run that was
    followed by anything decides, in whichever texts; of what each of these names as most frequent
    behind it, the token that counts most in all; of equals the first one's.
    """
    depth = min(each.tree.depth for each in evidence)
    text, likely, length = list(tokens[-depth:]), 1.0, depth
    for _ in range(most):
        length = min(length, len(text))
        best = None
        while length and best is None:  # the empty run tells nothing
            best = _likeliest(evidence, text[-length:])
            length -= best is None
        if best is None:
            return
        token, share = best
        likely *= share
        if likely < least:
            return
        yield token, likely
        text.append(token)
        length = min(length + 1, depth)


def _likeliest(evidence: Sequence[Evidence], run: Sequence[int]) -> tuple[int, float] | None:
    """Choose the token behind a run, and say how likely it is; None: nothing came after it."""
    known = [
        (each, followers)
        for each in evidence
        if (followers := each.tree.followers(run)) is not None
    ]
    if not known:
        return None
    total = sum(each.weight * own.total for each, own in known)
    if len(known) == 1:
        [(each, own)] = known
        token, times = own.token, each.weight * own.times
    else:
        weights = {
            own.token: sum(each.weight * each.tree.count(run, own.token) for each, _ in known)
            for _, own in known
        }
        token = max(weights, key=weights.__getitem__)
        times = weights[token]
    return token, times / (total + DOUBT / len(run) ** SURENESS)
