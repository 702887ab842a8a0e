"""The router through the engine: plain decoding's answers, whoever guesses, and whoever fails."""

from __future__ import annotations

import logging

import pytest
import torch
from reference.drafters import AlwaysWrong, Fake, Oracle, Raising
from reference.tiny_engine import Bench

from forerun.config import SpeculationConfig
from forerun.draft.base import Abilities, make_drafter
from forerun.draft.ngram import NgramDrafter
from forerun.draft.route import RoutingDrafter
from forerun.draft.suffix import SuffixDrafter
from forerun.engine import setup
from forerun.params import SamplingParams
from forerun.types import DraftRequest, Features, FeatureSpec, Proposal

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=48, ignore_eos=True)


class Passes(Fake):
    """Another drafter that says it runs a network."""

    abilities = Abilities(method="network", cost_class="pass")

    def __init__(self, inner: Fake) -> None:
        self.inner = inner

    def guess(self, request: DraftRequest) -> list[int]:
        return self.inner.guess(request)


def router(**others) -> RoutingDrafter:
    return RoutingDrafter({"ngram": NgramDrafter(1, 4), "suffix": SuffixDrafter(), **others})


def plain_of(tiny, prompts, params, **options):
    generated = Bench(tiny.folder, **options).generate(prompts, params)
    return [each.token_ids for each in generated]


def tokens_of(generated):
    assert all(each.error is None for each in generated)
    return [each.token_ids for each in generated]


def guessed(generated) -> dict[str, int]:
    """Accepted tokens by who had guessed them."""
    counts: dict[str, int] = {}
    for each in generated:
        for event in each.events:
            counts[event.method] = counts.get(event.method, 0) + event.num_accepted
    return counts


@pytest.mark.parametrize("row_cost", [0.0, 0.02, 0.14])
@pytest.mark.parametrize("together", [True, False], ids=["batch", "alone"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_are_plains(repeating, prompts, params, together, row_cost, monkeypatch):
    plain = plain_of(repeating, prompts, params)
    monkeypatch.setattr(setup, "measure_passes", lambda *_: (0.02, row_cost))
    drafter = router()
    bench = Bench(repeating.folder, drafter, max_draft=8)
    for part in [prompts] if together else [[prompt] for prompt in prompts]:
        bench.generate(part, params)
    assert tokens_of(bench.seen) == plain
    assert drafter.num_requests == 0
    stats = [each.stats for each in bench.seen]
    assert all(each.drafter_faults == {} for each in stats)
    assert sum(each.num_accepted for each in stats) > 5
    counts = guessed(bench.seen)
    assert set(counts) <= {"ngram", "suffix", "auto"}
    assert counts.get("auto", 0) == 0  # nobody's guess is no guess


def test_trees_are_drafted_where_rows_are_free(repeating, prompts):
    bench = Bench(repeating.folder, router(), max_draft=12)
    shapes = []
    forward = bench.machinery.runner.forward

    def watched(step, wanted=None):
        shapes.append(step.tree is not None)
        return forward(step, wanted)

    bench.machinery.runner.forward = watched
    assert tokens_of(bench.generate(prompts, GREEDY)) == plain_of(repeating, prompts, GREEDY)
    assert any(shapes)


def test_who_knows_the_answer_is_believed(tiny, prompts):
    """Its text is chaotic: look-ups have nothing to say."""
    plain = plain_of(tiny, prompts, GREEDY)
    answers = [[*prompt, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    bench = Bench(tiny.folder, router(knows=Passes(Oracle(answers, tiny.vocab_size))))
    assert tokens_of(bench.generate(prompts, GREEDY)) == plain
    counts = guessed(bench.seen)
    assert counts["knows"] > 5 * (counts.get("ngram", 0) + counts.get("suffix", 0))
    assert bench.num_steps < 20


def test_who_is_always_wrong_is_soon_left_alone(repeating, prompts, monkeypatch):
    monkeypatch.setattr(setup, "measure_passes", lambda *_: (0.02, 0.1))
    plain = plain_of(repeating, prompts, GREEDY)
    answers = [[*prompt, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]

    class Counting(Passes):
        calls = 0

        def guess(self, request):
            self.calls += 1
            return super().guess(request)

    wrong = Counting(AlwaysWrong(answers, repeating.vocab_size))
    bench = Bench(repeating.folder, router(wrong=wrong))
    for prompt in prompts:
        bench.generate([prompt], GREEDY)
    assert tokens_of(bench.seen) == plain
    num_steps = sum(each.stats.num_steps for each in bench.seen)
    assert 0 < wrong.calls < num_steps / 3
    assert guessed(bench.seen).get("wrong", 0) == 0


@pytest.mark.parametrize("verb", ["start", "propose", "observe", "finish"])
def test_who_fails_takes_nobody_down(repeating, prompts, verb, caplog):
    caplog.set_level(logging.WARNING)
    plain = plain_of(repeating, prompts, GREEDY)
    answers = [[*prompt, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    broken = Raising(Passes(Oracle(answers, repeating.vocab_size)), verb, 1)
    broken.abilities = Passes.abilities
    drafter = router(broken=broken)
    bench = Bench(repeating.folder, drafter)
    assert tokens_of(bench.generate(prompts, GREEDY)) == plain
    # Counted for the request that it failed; what happens while one ends comes too late for that.
    counted = {} if verb == "finish" else {f"broken: {verb}_failed": 1}
    assert [each.stats.drafter_faults for each in bench.seen] == [
        counted if index == 1 else {} for index in range(len(prompts))
    ]
    assert all(each.stats.num_accepted > 0 for each in bench.seen)
    assert drafter.faults == {f"broken: {verb}_failed": 1}
    assert guessed([bench.seen[0]]).get("broken", 0) > 0
    if verb in ("start", "propose"):
        assert guessed([bench.seen[1]]).get("broken", 0) == 0
    assert drafter.num_requests == 0


def test_all_failing_is_the_guards_affair(repeating, prompts, caplog):
    class Broken(Fake):
        def propose(self, requests):
            raise RuntimeError("no luck")

    bench = Bench(repeating.folder, RoutingDrafter({"only": Broken()}))
    few = prompts[:2]
    assert tokens_of(bench.generate(few, GREEDY)) == plain_of(repeating, few, GREEDY)
    for each in bench.seen:
        assert each.stats.drafter_faults == {"only: propose_failed": 1, "propose_failed": 1}


def test_hidden_states_reach_who_reads_them(tiny, prompts):
    class Reader(Fake):
        abilities = Abilities(method="reader", features=FeatureSpec(layers=(1,)), cost_class="pass")
        rows = 0

        def observe(self, outcomes, features: Features | None) -> None:
            if features is not None:
                self.rows += sum(len(span.rows) for span in features.spans)
                assert set(features.states.layers) == {1, 2}

    class Other(Reader):
        abilities = Abilities(method="other", features=FeatureSpec(layers=(2,)), cost_class="pass")

    members = {"reader": Reader(), "other": Other()}
    bench = Bench(tiny.folder, router(**members))
    bench.generate(prompts[:2], GREEDY)
    rows = {name: each.rows for name, each in members.items()}
    assert rows["reader"] == rows["other"] > sum(map(len, prompts[:2]))


class Sampler(Fake):
    """Draws from a distribution of its own: ten tokens, alike."""

    abilities = Abilities(method="sampler", gives_probs=True, cost_class="pass")

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.dice = torch.Generator().manual_seed(0)

    def propose(self, requests):
        width = max(each.max_draft for each in requests)
        tokens = torch.randint(10, (len(requests), width), generator=self.dice)
        lengths = torch.tensor([each.max_draft for each in requests])
        probs = torch.zeros(len(requests), width, self.vocab_size)
        probs[..., :10] = 0.1
        return Proposal(tokens, lengths, probs)


def test_sampled_drafts_meet_looked_up_ones_in_a_batch(repeating, prompts):
    """No fault: lengths are as the rules want them, and who drew nothing has no distribution."""
    drafter = router(sampler=Sampler(repeating.vocab_size))
    bench = Bench(repeating.folder, drafter, max_draft=3)
    params = [SEEDED, GREEDY] * 4
    generated = bench.generate(prompts, params)
    assert all(each.stats.drafter_faults == {} for each in generated)
    assert drafter.faults == {}
    methods = {event.method for each in generated for event in each.events}
    assert {"sampler", "ngram"} <= methods or {"sampler", "suffix"} <= methods
    assert tokens_of(generated[1::2]) == plain_of(repeating, prompts[1::2], GREEDY)


def test_auto_is_the_router(repeating):
    bench = Bench(repeating.folder)
    made = make_drafter(SpeculationConfig(), bench.machinery.setting)
    assert isinstance(made, RoutingDrafter)
    assert made.abilities.method == "auto"
    assert made.abilities.cost_class == "free"
    with_model = SpeculationConfig(model=str(repeating.folder))
    made = make_drafter(with_model, bench.machinery.setting)
    assert made.abilities.cost_class == "pass"
