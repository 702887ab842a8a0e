"""The router: picks who is better, pays for what is worth it, and outlives who fails."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from reference.known_texts import VOCABULARY, Clock, Player, Seer

from forerun.draft.base import Abilities, NoDrafter
from forerun.draft.candid import Guess
from forerun.draft.member import Drawn
from forerun.draft.merging import Choice
from forerun.draft.ngram import NgramDrafter
from forerun.draft.outlook import Outlook, Prospect
from forerun.draft.route import RoutingDrafter
from forerun.draft.suffix import SuffixDrafter
from forerun.draft.worth import worth
from forerun.params import SamplingParams
from forerun.types import (
    DraftRequest,
    Features,
    FeatureSpan,
    FeatureSpec,
    HiddenStates,
    Proposal,
    RequestOutcome,
)

SAMPLED = SamplingParams(temperature=0.8, seed=1)


def noise(seed: int, length: int) -> list[int]:
    """A text in which nothing comes twice in a row."""
    dice = random.Random(seed)
    return [dice.randrange(VOCABULARY - 1) for _ in range(length)]


def copies(seed: int, length: int) -> list[int]:
    """A text that is copied from its own beginning, with a slip now and then."""
    dice = random.Random(seed)
    text = noise(seed, 40)
    while len(text) < length:
        begin = dice.randrange(25)
        text += text[begin : begin + dice.randrange(4, 15)]
    return text[:length]


def mixed(seed: int, length: int) -> list[int]:
    """Copies and news in turn."""
    dice = random.Random(seed)
    text = noise(seed, 40)
    while len(text) < length:
        begin = dice.randrange(len(text) - 12)
        text += text[begin : begin + 12] + noise(len(text), 12)
    return text[:length]


def look_ups() -> dict:
    return {"ngram": NgramDrafter(1, 4), "suffix": SuffixDrafter()}


def router(clock: Clock, **others) -> RoutingDrafter:
    return RoutingDrafter({**look_ups(), **others}, clock=clock)


def split(text: list[int]) -> tuple[list[int], list[int]]:
    return text[:40], text[40:]


@pytest.mark.parametrize("row_cost", [0.02, 0.06, 0.14])
@pytest.mark.parametrize("make", [copies, noise])
def test_it_is_as_good_as_the_better_look_up(make, row_cost):
    rates = {}
    for name in ("ngram", "suffix", "auto"):
        clock = Clock()
        drafter = router(clock) if name == "auto" else look_ups()[name]
        player = Player(drafter, clock, row_cost=row_cost)
        for seed in range(8):
            player.play(seed, *split(make(seed, 300)))
        rates[name] = player.rate
    assert rates["auto"] >= 0.97 * max(rates["ngram"], rates["suffix"], 1.0)


def test_texts_that_nothing_is_known_of_cost_nothing():
    """A text of few words: look-ups always find something, and it is never right."""
    clock = Clock()
    player = Player(router(clock), clock, row_cost=0.14)
    dice = random.Random(0)
    for request_id in range(4):
        player.play(request_id, *split([dice.randrange(30) for _ in range(400)]))
    assert player.rate > 0.97
    assert sum(map(len, player.drafts[-200:])) < 20


@pytest.mark.parametrize(("rate", "call_s"), [(0.9, 0.1), (0.9, 0.4), (0.6, 0.1), (0.1, 0.2)])
@pytest.mark.parametrize("make", [mixed, noise])
def test_a_network_is_asked_where_it_is_worth_it(make, rate, call_s):
    texts = {request_id: make(request_id, 300) for request_id in range(8)}
    rates = {}
    for name in ("ngram", "suffix", "seer", "auto"):
        clock = Clock()
        seer = Seer(texts, clock, rate=rate, call_s=call_s)
        drafters = {**look_ups(), "seer": seer, "auto": router(clock, seer=seer)}
        player = Player(drafters[name], clock)
        for request_id, text in texts.items():
            player.play(request_id, *split(text))
        rates[name] = player.rate
    best = max(rates["ngram"], rates["suffix"], rates["seer"], 1.0)
    assert rates["auto"] >= 0.95 * best
    if make is noise and rate == 0.9:
        assert rates["auto"] > 1.5


def test_each_place_goes_to_who_is_better_there():
    """Copies go to the look-ups, which cost nothing; what is new goes to the network."""
    clock = Clock()
    texts = {}
    for request_id in range(6):
        old = noise(request_id, 60)
        texts[request_id] = [*old, *noise(100 + request_id, 60), *old, *noise(200, 30)]
    seer = Seer(texts, clock, rate=0.9, call_s=0.5)
    player = Player(router(clock, seer=seer), clock)
    for request_id, text in texts.items():
        player.play(request_id, text[:60], text[60:])
    assert {"ngram", "seer"} <= set(player.methods)
    num_calls = len(seer.calls)
    assert 0 < num_calls < len(player.methods)
    alone = Player(Seer(texts, clock, rate=0.9, call_s=0.5), clock)
    for request_id, text in texts.items():
        alone.play(request_id, text[:60], text[60:])
    assert player.rate > alone.rate


def test_what_is_not_worth_asking_is_asked_ever_more_rarely():
    clock = Clock()
    texts = {request_id: noise(request_id, 2040) for request_id in range(3)}
    seer = Seer(texts, clock, rate=0.05, call_s=0.3)
    player = Player(router(clock, seer=seer), clock)
    steps: list[int] = []
    for request_id, text in texts.items():
        before = len(seer.calls)
        player.play(request_id, *split(text))
        steps.append(len(seer.calls) - before)
    assert steps[0] > steps[1] > 0
    assert steps[1] <= 16
    assert player.rate > 0.98


def test_what_became_better_is_found_out():
    clock, text = Clock(), noise(1, 4000)

    class Late(Seer):
        """Right only about the later part of a text."""

        def _guess(self, request: DraftRequest) -> list[int]:
            self.rate = 0.95 if len(request.tokens) > 1500 else 0.0
            return super()._guess(request)

    late = Late({1: text}, clock, call_s=0.3)
    drafter = router(clock, seer=late)
    player = Player(drafter, clock)
    player.play(1, *split(text))
    assert len(late.calls) > 400
    assert player.num_tokens / len(player.methods) > 1.7
    assert drafter._outlooks[2]._num_told > 0  # a turn led to it, and that is remembered


def test_choices_repeat_exactly():
    def run() -> tuple:
        clock = Clock()
        texts = {request_id: copies(request_id, 400) for request_id in range(4)}
        seer = Seer(texts, clock, rate=0.5, call_s=0.2)
        player = Player(router(clock, seer=seer), clock, takes_trees=True)
        for request_id, text in texts.items():
            player.play(request_id, *split(text))
        return player.drafts, player.methods, seer.calls

    assert run() == run()


def test_one_call_for_all_requests_of_a_step():
    clock = Clock()
    texts = {request_id: noise(request_id, 100) for request_id in range(5)}
    seer = Seer(texts, clock, call_s=0.1)
    drafter = router(clock, seer=seer)
    views = [DraftRequest(key, text[:50], 6, pass_s=1.0) for key, text in texts.items()]
    for view in views:
        drafter.start(view)
    proposal = drafter.propose(views)
    assert seer.calls == [[0, 1, 2, 3, 4]]
    for row, length, text in zip(
        proposal.tokens.tolist(), proposal.lengths.tolist(), texts.values(), strict=True
    ):
        assert row[:length] == text[50 : 50 + length] != []
    assert proposal.methods == ["seer"] * 5


def test_in_company_drafts_are_shorter_where_rows_are_dear():
    lengths = {}
    for company in (1, 12):
        clock = Clock()
        drafter = router(clock)
        text = [*noise(3, 30), *noise(3, 6)]
        views = [DraftRequest(key, text, 8, row_cost=0.14) for key in range(company)]
        for view in views:
            drafter.start(view)
        lengths[company] = int(drafter.propose(views).lengths[0])
    assert lengths[1] > lengths[12]


def test_look_ups_that_disagree_make_a_tree_where_rows_are_cheap():
    text = [1, 2, 7, 9, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2]  # often 7, latest 8
    for row_cost, trees in ((0.0, True), (0.0, False), (0.5, True)):
        drafter = router(Clock())
        view = DraftRequest(0, text, 8, row_cost=row_cost, takes_trees=trees)
        drafter.start(view)
        proposal = drafter.propose([view])
        roots = (
            []
            if proposal.parents is None
            else [
                token
                for token, parent in zip(
                    proposal.tokens[0].tolist(), proposal.parents[0].tolist(), strict=True
                )
                if parent == 0
            ]
        )
        assert sorted(roots) == ([7, 8] if trees and row_cost == 0 else [])


def test_a_sampled_draft_is_taken_whole_beside_others_that_are_not():
    clock = Clock()
    texts = {0: noise(0, 100), 1: [*noise(1, 50), *noise(1, 50)]}
    seer = Seer(texts, clock, call_s=0.2, sampled=True)
    drafter = router(clock, seer=seer)
    views = [
        DraftRequest(0, texts[0][:50], 3, row_cost=0.02, pass_s=1.0, params=SAMPLED),
        DraftRequest(1, texts[1][:75], 3, row_cost=0.02, pass_s=1.0, params=SAMPLED),
    ]
    for view in views:
        drafter.start(view)
    for _ in range(3):  # until it is known that the calls cost something
        proposal = drafter.propose(views)
    assert seer.calls[-1] == [0]
    assert proposal.methods == ["seer", "ngram"]
    assert proposal.probs is not None
    assert proposal.lengths.tolist() == [3, 3]
    assert proposal.probs[0].sum(-1).tolist() == [1, 1, 1]
    assert not proposal.probs[1].any()  # nothing was drawn
    assert proposal.parents is None


def test_beside_a_sampled_draft_a_tree_is_its_first_path():
    drafter = router(Clock())
    tree = Choice([5, 6, 7], [0, 0, 1], 2.0, 0)
    drawn = Drawn([1, 2], torch.ones(2, 9) / 9)
    proposal = drafter._pack([tree, Choice([], [], 1.0, None)], {1: (1, drawn)})
    assert proposal.lengths.tolist() == [2, 2]
    assert proposal.tokens.tolist() == [[5, 7], [1, 2]]
    assert proposal.parents is None
    assert proposal.methods == ["ngram", "suffix"]


def test_a_sampling_drafter_that_is_not_worth_it_whole_is_not_asked():
    clock, text = Clock(), noise(4, 1000)
    seer = Seer({4: text}, clock, rate=0.2, call_s=0.5, sampled=True)
    player = Player(router(clock, seer=seer), clock, params=SAMPLED, max_draft=3)
    player.play(4, *split(text))
    assert 0 < len(seer.calls) < 40
    whole = [len(player.drafts[index]) for index, who in enumerate(player.methods) if who == "seer"]
    assert set(whole) == {3}


class Failing(NoDrafter):
    """Raises in one verb, for one request."""

    abilities = Abilities(method="failing", cost_class="pass", features=FeatureSpec(final=True))

    def __init__(self, verb: str, request_id: int) -> None:
        self.verb, self.request_id = verb, request_id
        self.asked: list[int] = []
        self.heard: list[int] = []

    def _trip(self, verb: str, ids: list[int]) -> None:
        if verb == self.verb and self.request_id in ids:
            raise RuntimeError(f"{verb} is broken")

    def start(self, request: DraftRequest) -> None:
        self._trip("start", [request.request_id])

    def propose(self, requests) -> Proposal:
        self._trip("propose", [each.request_id for each in requests])
        self.asked.extend(each.request_id for each in requests)
        return Proposal.from_lists([[3, 3, 3]] * len(requests))

    def observe(self, outcomes, features) -> None:
        spans = () if features is None else features.spans
        self._trip("observe", [each.request_id for each in (*outcomes, *spans)])
        self.heard.extend(each.request_id for each in outcomes)

    def finish(self, request_id: int) -> None:
        self._trip("finish", [request_id])


@pytest.mark.parametrize("verb", ["start", "propose", "observe", "finish"])
def test_who_fails_is_dropped_for_that_request(verb, caplog):
    failing = Failing(verb, 1)
    drafter = router(Clock(), failing=failing)
    views = [DraftRequest(key, [5, 6, 7, 8, 5, 6], 4) for key in range(3)]
    for view in views:
        drafter.start(view)
    for _ in range(3):
        proposal = drafter.propose(views)
        assert all(proposal.lengths.tolist())
        outcomes = [RequestOutcome(key, 1, 1, (3, 3, 3, 9), False, "ngram") for key in range(3)]
        drafter.observe(outcomes, None)
    for key in range(3):
        drafter.finish(key)
    assert drafter.faults == {f"failing: {verb}_failed": 1}
    assert f"{verb}_failed" in caplog.text
    assert failing.asked.count(0) == failing.asked.count(2) == 3
    assert failing.asked.count(1) == {"start": 0, "propose": 0, "observe": 1, "finish": 3}[verb]
    assert failing.heard.count(0) == failing.heard.count(2) == 3
    assert drafter.num_requests == 0
    assert drafter._members[-1]._failed == {}


def test_a_look_up_that_failed_is_not_asked_again(caplog):
    failing = Failing("propose", 1)
    failing.abilities = Abilities(method="failing")
    drafter = router(Clock(), failing=failing)
    views = [DraftRequest(key, [5, 6, 7, 8, 5, 6], 4) for key in range(2)]
    for view in views:
        drafter.start(view)
    for _ in range(3):
        assert drafter.propose(views).lengths.tolist()[1] > 0
    assert drafter.faults == {"failing: propose_failed": 1}


def test_a_request_that_all_have_failed_raises():
    drafter = RoutingDrafter({"a": Failing("propose", 1), "b": Failing("start", 1)})
    views = [DraftRequest(key, [5, 6], 4) for key in (0, 1)]
    for view in views:
        drafter.start(view)
    drafter.propose(views)
    with pytest.raises(RuntimeError, match="is broken"):
        drafter.propose(views)
    drafter.propose(views[:1])


@pytest.mark.parametrize(
    "wrong",
    [
        Proposal.empty(3),
        Proposal(torch.tensor([[1]]), torch.tensor([2]), None),
        Proposal(torch.tensor([[1, 2]]), torch.tensor([2]), None, torch.tensor([[0, 2]])),
        None,
    ],
    ids=["rows", "length", "tree", "nothing"],
)
def test_what_makes_no_sense_is_a_failure(wrong, caplog):
    class Careless(NoDrafter):
        abilities = Abilities(cost_class="pass")

        def propose(self, requests):
            return wrong

    drafter = router(Clock(), careless=Careless())
    view = DraftRequest(0, [5, 6, 7, 8, 5, 6], 4)
    drafter.start(view)
    assert drafter.propose([view]).tokens[0, 0] == 7
    assert drafter.faults == {"careless: propose_failed": 1}


def test_all_hear_of_everything_and_hidden_states_go_to_who_reads_them():
    clock = Clock()
    spec = FeatureSpec(layers=(2,))
    reads = Seer({0: noise(0, 50)}, clock, features=spec)
    blind = Seer({0: noise(0, 50)}, clock)
    drafter = RoutingDrafter({"reads": reads, "blind": blind, "free": NgramDrafter(1, 4)})
    assert drafter.abilities.features == spec
    assert drafter.abilities.cost_class == "pass"
    assert not drafter.abilities.gives_probs
    drafter.start(DraftRequest(0, [], 0))
    span = FeatureSpan(0, 0, torch.tensor([0, 1]))
    features = Features(HiddenStates({2: torch.ones(2, 4)}, None), (span,))
    outcome = RequestOutcome(0, 0, 0, (1,), False, "forced")
    drafter.observe([outcome], features)
    assert reads.heard == blind.heard == [outcome]
    assert reads.features == [features]
    assert blind.features == [None]
    drafter.finish(0)
    assert not reads.alive | blind.alive


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_look_ups_say_how_likely_their_guesses_are(name):
    """What they tell the router begins with what they would propose, where rows are free."""
    for seed in range(6):
        drafter = look_ups()[name]
        view = DraftRequest(0, copies(seed, 120), 15)
        drafter.start(view)
        proposal = drafter.propose([view])
        guess = drafter.guess_with_chances(view)
        proposed = proposal.tokens[0, : int(proposal.lengths[0])].tolist()
        assert list(guess.tokens[: len(proposed)]) == proposed[: len(guess.tokens)]
        assert len(guess.chances) == len(guess.tokens)
        assert all(0 < chance < 1 for chance in guess.chances)
        least = math.prod(guess.chances)
        assert least >= 0.02
        nothing = DraftRequest(0, view.tokens, 0)
        assert drafter.guess_with_chances(nothing).tokens in ((), [])


def test_only_look_ups_are_free():
    assert router(Clock()).abilities == Abilities(
        method="auto", gives_trees=True, cost_class="free"
    )


def test_turns_come_ever_later_until_it_is_worth_asking():
    outlook, prospect = Outlook(), Prospect()

    def turns(count: int) -> list[int]:
        due = []
        for step in range(count):
            outlook.note_step(prospect)
            if outlook.is_due(prospect, 0.1):
                outlook.note_turn(prospect, 0.1)
                due.append(step)
        return due

    first = turns(200)
    gaps = [later - earlier for earlier, later in pairwise(first)]
    assert len(gaps) >= 2
    assert all(later >= 2 * earlier for earlier, later in pairwise(gaps))
    outlook.note_worth(prospect)
    assert turns(30)
    assert turns(1) == []


def test_turns_cost_a_small_part_and_less_where_they_tell_nothing():
    dear = Outlook()
    spent = []
    for _ in range(60):
        prospect = Prospect()
        for _ in range(100):
            dear.note_step(prospect)
            if dear.is_due(prospect, 0.5):
                dear.note_turn(prospect, 0.5)
        spent.append(prospect.spent)
    assert 0 < spent[0] <= 0.02 * 120 + 0.5
    assert sum(spent[-20:]) <= 0.004 * 100 * 20
    assert sum(spent[-20:]) > 0


def test_what_nobody_asked_for_is_no_failure():
    """A guess as long as allowed that held throughout says nothing about the next depth."""
    outlook, prospect = Outlook(), Prospect()
    for _ in range(20):
        outlook.score(Guess([1, 2]), 2, [1, 2, 3], prospect)
        outlook.score(Guess([1, 2]), 8, [1, 2], prospect)  # the text ended
    full = outlook.chances(3, prospect)[2]
    for _ in range(20):
        outlook.score(Guess([1, 2]), 8, [1, 2, 3], prospect)
    assert full > 0.7
    assert outlook.chances(3, prospect)[2] < 0.5


def test_a_draft_that_is_taken_whole_is_worth_what_all_of_it_is():
    outlook, prospect = Outlook(), Prospect()
    for _ in range(400):
        outlook.score(Guess([1, 2, 3]), 8, [1, 9], prospect)
    request = DraftRequest(0, [], 8, row_cost=0.1)
    part = outlook.worth(request, prospect, 1.0, 0.0, whole=False)
    whole = outlook.worth(request, prospect, 1.0, 0.0, whole=True)
    assert whole < worth(0, 0) <= part


def test_prospects_follow_the_request_before_the_traffic():
    outlook, good, bad = Outlook(), Prospect(), Prospect()
    for _ in range(8):
        outlook._count(1, True, good)
        outlook._count(2, True, good)
        outlook._count(1, False, bad)
    fresh = outlook.chances(2, Prospect())
    assert outlook.chances(2, bad)[0] < fresh[0] < outlook.chances(2, good)[0]
    assert all(second < first for first, second in [fresh, outlook.chances(2, good)])
