"""Drafters that break their promises, each in one way: the conformance tests must say so."""

from __future__ import annotations

import pytest
import test_drafter_conformance as conformance
from reference.drafter_zoo import Species, ZooBench
from test_drafter_conformance import GREEDY, cyclic  # noqa: F401  (a fixture)

from forerun.draft import base
from forerun.draft.ngram import NgramDrafter
from forerun.draft.suffix import SuffixDrafter
from forerun.draft.suffix_store import SuffixStore
from forerun.types import Proposal


class Leaky(NgramDrafter):
    """Keep state of every third request for ever."""

    def finish(self, request_id):
        if request_id % 3:
            super().finish(request_id)


class Gossip(NgramDrafter):
    """Guess for each request whatever somebody else said, as if it followed."""

    said: dict[int, list[int]]

    def start(self, request):
        self.said = getattr(self, "said", {})
        super().start(request)

    def propose(self, requests):
        proposal = super().propose(requests)
        rows = zip(proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True)
        drafts = [row[:length] for row, length in rows]
        for index, request in enumerate(requests):
            self.said[request.request_id] = list(request.tokens)
            others = [text for key, text in self.said.items() if key != request.request_id]
            if others and not drafts[index]:
                drafts[index] = others[0][: request.max_draft]
        return Proposal.from_lists(drafts)


class OpenStore(SuffixStore):
    """One store for all tenants."""

    def tree(self, salt):
        return super().tree("all")

    def add(self, salt, output):
        super().add("all", output)


class Indiscreet(SuffixDrafter):
    def __init__(self, *_):
        super().__init__(OpenStore(10_000, 3600))


class TooLong(NgramDrafter):
    def propose(self, requests):
        return Proposal.from_lists([[5] * (request.max_draft + 1) for request in requests])


class Forgetful(NgramDrafter):
    """Lose a request's state on the way, and trip over it."""

    def observe(self, outcomes, features):
        for outcome in outcomes:
            self._indexes.pop(outcome.request_id, None)


class Idle(NgramDrafter):
    def propose(self, requests):
        return Proposal.empty(len(requests))


def _held(drafter):
    return len(drafter._requests if isinstance(drafter, SuffixDrafter) else drafter._indexes)


@pytest.fixture
def species(request, monkeypatch) -> Species:
    """Register a drafter for one test."""
    kind = request.param
    monkeypatch.setitem(base._FACTORIES, "bad", lambda config, setting: kind(1, 4))
    return Species("bad", _held)


@pytest.mark.parametrize("species", [Leaky], indirect=True)
def test_state_that_is_kept(cyclic, prompts, species):  # noqa: F811
    bench = ZooBench(cyclic.folder, species)
    with pytest.raises(AssertionError, match="outlived"):
        bench.generate(prompts, GREEDY)


@pytest.mark.parametrize("species", [Gossip, Indiscreet], indirect=True)
def test_tokens_of_another_request(cyclic, species):  # noqa: F811
    with pytest.raises(AssertionError, match="<="):
        conformance.test_no_request_sees_the_tokens_of_another(cyclic, species)


@pytest.mark.parametrize("species", [TooLong], indirect=True)
def test_drafts_that_are_too_long(cyclic, prompts, species):  # noqa: F811
    bench = ZooBench(cyclic.folder, species)
    with pytest.raises(AssertionError, match="length"):
        bench.generate(prompts, GREEDY)


@pytest.mark.parametrize("species", [Forgetful, Idle], indirect=True)
def test_drafts_that_fail_or_never_come(repeating, prompts, species, caplog):
    with pytest.raises(AssertionError):
        conformance.test_answers_are_the_plain_ones(repeating, prompts, species, GREEDY, True)


def test_a_name_that_the_zoo_does_not_have(monkeypatch):
    monkeypatch.setitem(base._FACTORIES, "new", base._FACTORIES["none"])
    with pytest.raises(AssertionError):
        conformance.test_no_drafter_is_forgotten()
