"""Choose among drafters, per request and step, by what they were right about and what they cost.

Drafters that only look something up guess every time. One that runs a network is asked where its
guess is expected to be worth more than theirs, and now and then elsewhere, ever more rarely, lest
what is known of it grow old. All guesses of a step are merged (`merging`), and what is drafted is
the part that is worth most (`worth`), down to nothing. Every guess is then scored on the text that
came, used or not: the request's own counts, and those of all traffic where it has few (`tallies`).

Drafts are exact whatever is chosen, so what was measured decides how fast a text comes, not which.
A sampled draft is taken whole or not asked for: a length chosen by what was drawn would move the
output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..config import SpeculationConfig
from ..types import DraftRequest, Features, FeatureSpec, Proposal, RequestOutcome
from .base import Abilities, Drafter, make_drafter
from .candid import Guess
from .member import Drawn, Member
from .merging import Choice, GuessTree
from .outlook import Outlook, Prospect
from .setting import DraftSetting
from .tallies import Record, Tallies
from .worth import least_chance, share_of_pass

__all__ = ["RoutingDrafter", "make_router"]

METHOD = "auto"


@dataclass(slots=True)
class _State:
    """What is known of a request."""

    record: Record
    prospects: dict[int, Prospect]  # of drafters that run a network
    tree: GuessTree | None = None  # what was guessed in this step
    asked: dict[int, tuple[Guess, int]] = field(default_factory=dict)  # in this step: guess, limit


class RoutingDrafter:
    """A drafter over others, by name."""

    def __init__(
        self, members: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._members = [Member(name, drafter, clock) for name, drafter in members.items()]
        self._outlooks = {
            index: Outlook() for index, member in enumerate(self._members) if not member.is_free
        }
        self.abilities = _unite([member.abilities for member in self._members])
        self._traffic = Tallies()
        self._requests: dict[int, _State] = {}

    @property
    def num_requests(self) -> int:
        """How many requests it keeps something of."""
        return len(self._requests)

    @property
    def faults(self) -> dict[str, int]:
        """How often drafters failed, by name and reason."""
        return {
            f"{member.name}: {reason}": count
            for member in self._members
            for reason, count in member.faults.items()
        }

    def take_faults(self) -> list[tuple[int, str]]:
        """Hand over whom a drafter has failed, and which one why, since the last call."""
        faults = [fault for member in self._members for fault in member.untold]
        for member in self._members:
            member.untold.clear()
        return faults

    def start(self, request: DraftRequest) -> None:
        self._requests[request.request_id] = _State(
            Record(self._traffic), {index: Prospect() for index in self._outlooks}
        )
        for member in self._members:
            member.start(request)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        states = [self._requests[request.request_id] for request in requests]
        for request, state in zip(requests, states, strict=True):
            self._check_anybody_left(request)
            state.tree, state.asked = GuessTree(), {}
        share = share_of_pass(len(requests), requests[0].row_cost) if requests else 1.0
        self._look_up(requests, states, share)
        choices = [_choose(*each, share, 0.0) for each in zip(requests, states, strict=True)]
        drawn: dict[int, tuple[int, Drawn]] = {}
        for member, places in self._share_out(requests, states, choices, share).items():
            asked = [requests[place] for place in places]
            guesses = self._members[member].ask(asked)
            cost = self._cost(member, asked[0], len(asked))
            for place, guess in zip(places, guesses, strict=True):
                if isinstance(guess, Drawn):
                    drawn[place] = member, guess
                choices[place] = self._choose_again(
                    member, requests[place], states[place], guess, share, cost
                )
        return self._pack(choices, drawn)

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        for outcome in outcomes:
            state = self._requests[outcome.request_id]
            if state.tree is not None:
                state.tree.score(outcome.emitted, state.record)
            for index, (guess, limit) in state.asked.items():
                prospect = state.prospects[index]
                self._outlooks[index].score(guess, limit, outcome.emitted, prospect)
            state.tree, state.asked = None, {}
        for member in self._members:
            member.observe(outcomes, features)

    def finish(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        for member in self._members:
            member.finish(request_id)

    def _check_anybody_left(self, request: DraftRequest) -> None:
        """Raise what the last drafter raised if all have failed a request: it is nobody's now."""
        failures = [member.failure(request.request_id) for member in self._members]
        if failures and all(failures):
            assert failures[-1] is not None
            raise failures[-1]

    def _look_up(
        self, requests: Sequence[DraftRequest], states: Sequence[_State], share: float
    ) -> None:
        """Have everybody guess whose guesses cost next to nothing."""
        for index, member in enumerate(self._members):
            if not member.is_free:
                continue
            for state, guess in zip(states, member.ask(requests), strict=True):
                assert state.tree is not None
                if isinstance(guess, Guess):
                    state.tree.add(index, guess)
        for request, state in zip(requests, states, strict=True):
            assert state.tree is not None
            state.tree.weigh(state.record, least_chance(request.row_cost, share))

    def _share_out(
        self,
        requests: Sequence[DraftRequest],
        states: Sequence[_State],
        choices: Sequence[Choice],
        share: float,
    ) -> dict[int, list[int]]:
        """Say who else is asked about which requests: drafter -> places in the batch."""
        asked: dict[int, list[int]] = {}
        for place, (request, state) in enumerate(zip(requests, states, strict=True)):
            able = [
                index
                for index in self._outlooks
                if request.max_draft and not self._members[index].failure(request.request_id)
            ]
            best, value = None, choices[place].worth
            for index in able:
                self._outlooks[index].note_step(state.prospects[index])
                own = self._expect(index, request, state, share, len(requests))
                if own > value:
                    best, value = index, own
            if best is not None:
                self._outlooks[best].note_worth(state.prospects[best])
                asked.setdefault(best, []).append(place)
                continue
            for index in able:
                cost = self._cost(index, request, 1)
                if self._outlooks[index].is_due(state.prospects[index], cost):
                    self._outlooks[index].note_turn(state.prospects[index], cost)
                    asked.setdefault(index, []).append(place)
                    break
        return asked

    def _expect(
        self, index: int, request: DraftRequest, state: _State, share: float, num_requests: int
    ) -> float:
        """Rate a step in which a drafter is asked, before it is."""
        cost = self._cost(index, request, num_requests)
        whole = self._members[index].abilities.gives_probs and request.params.temperature > 0
        return self._outlooks[index].worth(
            request, state.prospects[index], share, cost, whole=whole
        )

    def _choose_again(
        self,
        member: int,
        request: DraftRequest,
        state: _State,
        guess: Guess | Drawn,
        share: float,
        cost: float,
    ) -> Choice:
        """Choose, now that a drafter has said what it was asked for."""
        assert state.tree is not None
        plain = guess if isinstance(guess, Guess) else Guess(guess.tokens)
        state.asked[member] = plain, request.max_draft
        self._outlooks[member].note_guess(plain)
        if isinstance(guess, Guess):
            state.tree.add(member, guess)
            state.tree.weigh(state.record, least_chance(request.row_cost, share))
        return _choose(request, state, share, cost)

    def _cost(self, member: int, request: DraftRequest, num_requests: int) -> float:
        """Say what a drafter's guess costs a request, in passes over one row; 0: not measured."""
        if request.pass_s <= 0:
            return 0.0
        return self._members[member].times.each_s(num_requests) / request.pass_s

    def _pack(self, choices: Sequence[Choice], drawn: Mapping[int, tuple[int, Drawn]]) -> Proposal:
        """Put drafts together; where some were drawn, rows of zeros say which were not."""
        methods = [
            METHOD if choice.backer is None else self._members[choice.backer].name
            for choice in choices
        ]
        if not drawn:
            if all(choice.is_path for choice in choices):
                proposal = Proposal.from_lists([choice.tokens for choice in choices])
            else:
                trees = [(choice.tokens, choice.parents) for choice in choices]
                proposal = Proposal.from_trees(trees)
            return replace(proposal, methods=methods)
        rows: list[Sequence[int]] = [choice.first_path() for choice in choices]
        for place, (member, draft) in drawn.items():
            methods[place], rows[place] = self._members[member].name, draft.tokens
        proposal = Proposal.from_lists(rows)
        any_probs = next(iter(drawn.values()))[1].probs
        shape = (*proposal.tokens.shape, any_probs.shape[-1])
        probs = torch.zeros(shape, device=any_probs.device)
        for place, (_, draft) in drawn.items():
            probs[place, : len(draft.tokens)] = draft.probs
        return replace(proposal, probs=probs, methods=methods)


def make_router(config: SpeculationConfig, setting: DraftSetting) -> RoutingDrafter:
    """Build the router over every drafter that this configuration allows for."""
    return RoutingDrafter(_members(config, setting))


def _members(config: SpeculationConfig, setting: DraftSetting) -> dict[str, Drafter]:
    """Make the look-up drafters and, if a model or head is given, the one that it is for."""
    without = replace(config, model=None, medusa_choices=None)
    configs = {name: replace(without, drafter=name) for name in ("ngram", "suffix")}
    if config.model is not None:
        from .head_loading import name_drafter

        name = name_drafter(config.model)
        choices = config.medusa_choices if name == "medusa" else None
        configs[name] = replace(config, drafter=name, medusa_choices=choices)
    return {name: make_drafter(own, setting) for name, own in configs.items()}


def _unite(parts: Sequence[Abilities]) -> Abilities:
    features: FeatureSpec | None = None
    for part in parts:
        if part.features is not None:
            features = part.features if features is None else features.union(part.features)
    return Abilities(
        method=METHOD,
        features=features,
        gives_probs=any(part.gives_probs for part in parts),
        gives_trees=True,  # look-ups that disagree
        cost_class="free" if all(part.cost_class == "free" for part in parts) else "pass",
    )


def _choose(request: DraftRequest, state: _State, share: float, paid: float) -> Choice:
    assert state.tree is not None
    return state.tree.choose(
        request.max_draft,
        request.row_cost,
        share=share,
        paid=paid,
        branching=request.takes_trees,
    )
