"""What every drafter must stand: whatever happens around it, answers are those of plain decoding.

Each test goes through the whole zoo (`reference/drafter_zoo.py`), on the real engine step by step.
Beside the answers it sees that drafts are well formed, that each request's state is dropped at its
end, and that something was drafted and accepted, so that nothing here passes by doing nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from reference.drafter_zoo import ZOO, Species, ZooBench
from reference.tiny import make_tiny
from reference.tiny_engine import Bench

from forerun.draft.base import Drafter, drafter_names
from forerun.params import SamplingParams
from forerun.types import DraftRequest, FinishReason, Proposal

GREEDY = SamplingParams(temperature=0, max_tokens=32)
SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=32)
BRIEF = replace(GREEDY, max_tokens=20)  # where it is about who is asked, not about sampling
CYCLE = list(range(28, 35))  # tokens that call for one another, all of them plain characters
ROUND = [*CYCLE, *CYCLE, 28, 29]


@pytest.fixture(scope="module")
def cyclic(tmp_path_factory):
    """A model that goes round in cycles of seven tokens: look-ups are nearly always right."""
    return make_tiny(tmp_path_factory.mktemp("cyclic") / "model", habit=3.0)


@pytest.fixture(scope="module")
def ending(tmp_path_factory):
    """The same, but one token of the cycle ends the text."""
    return make_tiny(tmp_path_factory.mktemp("ending") / "model", habit=3.0, eos=[CYCLE[5]])


@pytest.fixture(params=ZOO, ids=list(ZOO))
def species(request) -> Species:
    return ZOO[request.param]


@pytest.fixture(params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def params(request, species) -> SamplingParams:
    """Greedy for all; with a seed for those whose drafts keep the tokens, not just their odds."""
    if request.param.temperature and not species.deterministic:
        pytest.skip("samples its drafts: held to the distribution elsewhere")
    return request.param


def assert_plain(tiny, generated, params, **options):
    """Answers are the slow twin's, and nothing failed on the way."""
    each_own = [params] * len(generated) if isinstance(params, SamplingParams) else params
    for each, own in zip(generated, each_own, strict=True):
        want = tiny.plain(each.request.tokens[: each.request.num_prompt], own, **options)
        assert tuple(each.token_ids) == want.token_ids
        assert (each.text, each.finish_reason) == (want.text, want.finish_reason)
        assert (each.error, each.stats.drafter_faults) == (None, {})


def assert_drafted(bench: ZooBench) -> None:
    """Where the drafter drafts at all, some of it was right."""
    assert bench.num_drafted >= bench.num_accepted >= 0
    assert (bench.num_accepted > 0) == bench.species.drafts


def test_no_drafter_is_forgotten():
    assert {species.drafter for species in ZOO.values()} == set(drafter_names())


# Where drafts are right, wrong and of any length


@pytest.mark.parametrize("together", [True, False], ids=["batch", "alone"])
def test_answers_are_the_plain_ones(repeating, prompts, species, params, together):
    bench = ZooBench(repeating.folder, species)
    for batch in [prompts] if together else [[prompt] for prompt in prompts]:
        bench.generate(batch, params)
    assert_plain(repeating, bench.seen, params)
    assert_drafted(bench)


def test_where_everything_is_accepted(cyclic, prompts, species):
    bench = ZooBench(cyclic.folder, species)
    bench.generate(prompts, replace(GREEDY, max_tokens=60))
    assert_plain(cyclic, bench.seen, replace(GREEDY, max_tokens=60))
    assert_drafted(bench)
    least = 0.6 if bench.drafter.abilities.gives_trees else 0.8  # of siblings all but one are wrong
    assert bench.num_accepted >= least * bench.num_drafted
    assert (bench.num_steps < 45) == species.drafts


class Contrary:
    """Another drafter whose every draft is made to begin with a wrong token."""

    def __init__(self, inner: Drafter, answers: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.inner, self._answers, self._vocab_size = inner, answers, vocab_size
        self.abilities = inner.abilities
        self.start, self.observe, self.finish = inner.start, inner.observe, inner.finish

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        proposal = self.inner.propose(requests)
        tokens, parents = proposal.tokens.clone(), proposal.parents
        for row, request in enumerate(requests):
            length = int(proposal.lengths[row])
            firsts = [
                i for i in range(length) if (i == 0 if parents is None else parents[row, i] == 0)
            ]
            right = self._answers[request.request_id][len(request.tokens)]
            taken = {int(tokens[row, index]) for index in firsts} | {right}
            for index in firsts:
                if tokens[row, index] == right:
                    tokens[row, index] = min(set(range(self._vocab_size)) - taken)
        return replace(proposal, tokens=tokens)


def test_where_nothing_is_accepted(repeating, prompts, species):
    if not species.deterministic:
        pytest.skip("a sampled draft cannot be changed afterwards")
    answers = repeating.answers(prompts, GREEDY)
    bench = ZooBench(
        repeating.folder, species, wrap=lambda own: Contrary(own, answers, repeating.vocab_size)
    )
    bench.generate(prompts, GREEDY)
    assert_plain(repeating, bench.seen, GREEDY)
    assert bench.num_accepted == 0
    assert (bench.num_drafted > 0) == species.drafts


@pytest.mark.parametrize("max_draft", [1, 64])
def test_short_and_long_drafts(cyclic, prompts, species, params, max_draft):
    bench = ZooBench(cyclic.folder, species, max_draft=max_draft)
    bench.generate(prompts[:4], params)
    assert_plain(cyclic, bench.seen, params)
    assert_drafted(bench)
    deepest = max(len(each.stats.offered_by_position) for each in bench.seen)
    assert deepest <= max_draft
    assert (deepest > 1) == (species.drafts and max_draft > 1)


def test_the_engine_may_ask_for_no_drafts(cyclic, prompts, species):
    """Of one request that opted out, beside others that did not."""
    own = [replace(GREEDY, max_draft=0), GREEDY]
    bench = ZooBench(cyclic.folder, species)
    out, beside = bench.generate(prompts[:2], own)
    assert_plain(cyclic, bench.seen, GREEDY)
    assert out.stats.num_drafted == 0
    assert (beside.stats.num_accepted > 0) == species.drafts


# Where a request begins and ends


def test_the_end_of_text_inside_a_draft(ending, species):
    bench = ZooBench(ending.folder, species)
    bench.generate([ROUND], GREEDY)
    assert_plain(ending, bench.seen, GREEDY)
    assert bench.seen[0].finish_reason is FinishReason.STOP
    assert bench.seen[0].token_ids[-1] == CYCLE[5]
    assert_drafted(bench)
    if species.copies and species.drafts:  # it went on behind the end
        assert any(CYCLE[5] in draft[:-1] for _, _, draft in bench.watched.drafts[0])


def test_a_stop_string_inside_a_draft(cyclic, species):
    stop = cyclic.codec.decode([CYCLE[4], CYCLE[5]])
    params = replace(GREEDY, stop=[stop])
    bench = ZooBench(cyclic.folder, species)
    bench.generate([ROUND], params)
    assert_plain(cyclic, bench.seen, params)
    assert bench.seen[0].finish_reason is FinishReason.STOP
    assert_drafted(bench)


@pytest.mark.parametrize("max_draft", [7, 64])
def test_the_end_of_the_context(cyclic, species, max_draft):
    params = replace(GREEDY, max_tokens=None)
    bench = ZooBench(cyclic.folder, species, max_draft=max_draft, max_model_len=48)
    bench.generate([ROUND], params)
    assert_plain(cyclic, bench.seen, params, max_model_len=48)
    assert len(bench.seen[0].request.tokens) == 48
    assert_drafted(bench)


def test_prompts_of_one_token(cyclic, species):
    bench = ZooBench(cyclic.folder, species)
    bench.generate([[30], [3]], GREEDY)
    assert_plain(cyclic, bench.seen, GREEDY)
    assert_drafted(bench)


def test_cancelled_on_the_way(repeating, prompts, species):
    bench = ZooBench(repeating.folder, species, max_num_seqs=3)
    running, waiting = [bench.add(prompt, GREEDY) for prompt in prompts[:4]], prompts[4]
    while len(running[1].token_ids) < 5:
        bench.step()
    left = bench.add(waiting, GREEDY)  # has not been scheduled when it goes
    bench.cancel(running[1])
    bench.cancel(left)
    bench.run()
    rest = [running[0], *running[2:]]
    assert_plain(repeating, rest, GREEDY)
    got = tuple(running[1].token_ids)
    assert got == repeating.plain(prompts[1], GREEDY).token_ids[: len(got)]
    assert running[1].finish_reason is left.finish_reason is FinishReason.CANCELLED
    assert_drafted(bench)


# Where requests meet


def test_preempted_and_computed_again(repeating, prompts, species, params):
    bench = ZooBench(
        repeating.folder, species, cache_blocks=16, max_model_len=128,
        max_num_batched_tokens=20, max_num_seqs=8,
    )  # fmt: skip
    bench.generate(prompts, params)
    assert_plain(repeating, bench.seen, params)
    assert sum(each.stats.num_preemptions for each in bench.seen) > 0
    assert_drafted(bench)


def test_a_prompt_that_was_computed_before(cyclic, prompts, species, params):
    bench = ZooBench(cyclic.folder, species)
    long = prompts[5]
    for prompt in (long, long, [*long, *ROUND]):
        bench.generate([prompt], params)
    assert_plain(cyclic, bench.seen, params)
    assert [each.stats.num_cached_tokens > 0 for each in bench.seen] == [False, True, True]
    assert_drafted(bench)


def test_requests_that_come_and_go(repeating, prompts, species, params):
    """One joins every other step, so that every batch is another one."""
    bench = ZooBench(repeating.folder, species, max_num_seqs=4)
    for prompt in prompts:
        bench.add(prompt, params)
        bench.step()
        bench.step()
    bench.run()
    assert_plain(repeating, bench.seen, params)
    assert_drafted(bench)


def test_options_beside_one_another(repeating, prompts, species):
    """What changes the target's distribution changes nothing else: against no drafter at all."""
    if not species.deterministic:
        pytest.skip("samples its drafts: held to the distribution elsewhere")
    own = [
        replace(GREEDY, frequency_penalty=1.5),
        replace(SEEDED, repetition_penalty=1.2, top_k=30),
        replace(SEEDED, logit_bias={5: 3.0}, top_p=0.9),
        replace(GREEDY, logprobs=2),
        replace(SEEDED, min_tokens=20, min_p=0.02),
        replace(GREEDY, banned_token_ids=[30, 31]),
        replace(SEEDED, bad_words=["ab"]),
        GREEDY,
    ]
    bench, plain = ZooBench(repeating.folder, species), Bench(repeating.folder)
    bench.generate(prompts, own)
    plain.generate(prompts, own)
    for each, want in zip(bench.seen, plain.seen, strict=True):
        assert (each.token_ids, each.text) == (want.token_ids, want.text)
        assert (each.error, each.stats.drafter_faults) == (None, {})
    assert_drafted(bench)


def test_no_request_sees_the_tokens_of_another(cyclic, species):
    """Of several tenants, side by side and one after the other; their texts begin alike."""
    ours = [[28, 29], ROUND]
    theirs = [[28, 29, 63, 64] * 5, [*[28, 29, 140, 141] * 3, 28, 29]]
    own = [replace(GREEDY, cache_salt=f"ours {index}") for index in range(2)]
    other = [replace(GREEDY, cache_salt="theirs")] * 2
    company = ZooBench(cyclic.folder, species)
    company.generate(theirs, other)
    among = company.generate([*theirs, *ours], other + own)[2:]
    for prompt, params, generated in zip(ours, own, among, strict=True):
        alone = ZooBench(cyclic.folder, species)
        [lonely] = alone.generate([prompt], params)
        assert generated.token_ids == lonely.token_ids
        tokens = generated.request.tokens
        mine = company.watched.drafts.get(generated.request.request_id, [])
        if species.copies:
            for length, _, draft in mine:
                assert set(draft) <= set(tokens[:length])
        if species.alone:
            before = {length: draft for length, _, draft in alone.watched.drafts.get(0, [])}
            both = [(before[length], draft) for length, _, draft in mine if length in before]
            assert len(both) > 1
            for one, another in both:
                shared = min(len(one), len(another))  # there may have been less room for one
                assert one[:shared] == another[:shared]
    assert_drafted(company)


# Where the drafter breaks


class Crashing:
    """Another drafter that raises at the call number `first` of a verb, once or from then on."""

    def __init__(self, inner: Drafter, verb: str, first: int, *, once: bool, late: bool = False):
        self.inner, self.abilities = inner, inner.abilities
        self._verb, self._first, self._once, self._late = verb, first, once, late
        self.num_calls = self.num_crashes = 0

    def _call(self, verb: str, *given):
        self.num_calls += verb == self._verb
        broken = verb == self._verb and (
            self.num_calls == self._first or (self.num_calls > self._first and not self._once)
        )
        self.num_crashes += broken
        if broken and not self._late:
            raise RuntimeError(f"{verb} is broken")
        answer = getattr(self.inner, verb)(*given)
        if broken:
            raise RuntimeError(f"{verb} broke at its end")
        return answer

    def start(self, request):
        self._call("start", request)

    def propose(self, requests):
        return self._call("propose", requests)

    def observe(self, outcomes, features):
        self._call("observe", outcomes, features)

    def finish(self, request_id):
        self._call("finish", request_id)


def crashing(tiny, species, verb, first, **how):
    made = []

    def wrap(inner: Drafter) -> Drafter:
        made.append(Crashing(inner, verb, first, **how))
        return made[0]

    return ZooBench(tiny.folder, species, wrap=wrap), made


def assert_answers(tiny, generated, params):
    for each in generated:
        want = tiny.plain(each.request.tokens[: each.request.num_prompt], params)
        assert tuple(each.token_ids) == want.token_ids
        assert each.error is None


@pytest.mark.parametrize(
    ("verb", "first", "late"),
    [
        ("start", 1, False), ("start", 1, True), ("propose", 1, False), ("propose", 3, False),
        ("propose", 3, True), ("observe", 1, False), ("observe", 3, True), ("finish", 1, True),
    ],
)  # fmt: skip
def test_once_broken_always_plain(repeating, prompts, species, verb, first, late, caplog):
    """From some call on it raises for whoever it is: every request is counted and goes on."""
    bench, made = crashing(repeating, species, verb, first, once=False, late=late)
    bench.generate(prompts[:4], BRIEF)
    assert_answers(repeating, bench.seen, BRIEF)
    for each in bench.seen:
        assert each.stats.drafter_faults == {f"{verb}_failed": 1}
        if first == 1 and verb in ("start", "propose"):
            assert each.stats.num_drafted == 0
    assert made[0].num_crashes >= 4


@pytest.mark.parametrize(
    ("verb", "late"), [("propose", False), ("propose", True), ("observe", False)]
)
def test_a_batch_that_failed_together_is_asked_one_by_one(
    repeating, prompts, species, verb, late, caplog
):
    """A failure that is nobody's costs nobody its drafts."""
    bench, made = crashing(repeating, species, verb, 3, once=True, late=late)
    bench.generate(prompts[:4], BRIEF)
    assert_plain(repeating, bench.seen, BRIEF)
    assert made[0].num_crashes == 1
    assert_drafted(bench)


def test_the_only_request_loses_its_drafts_at_once(cyclic, prompts, species, caplog):
    bench, _ = crashing(cyclic, species, "propose", 3, once=True)
    [alone] = bench.generate(prompts[:1], BRIEF)
    assert_answers(cyclic, [alone], BRIEF)
    assert alone.stats.drafter_faults == {"propose_failed": 1}
    assert len(bench.watched.drafts[0]) == 2
    # And whoever comes next has a drafter again.
    bench.generate(prompts[1:2], BRIEF)
    assert_plain(cyclic, bench.seen[1:], BRIEF)
    assert (bench.seen[1].stats.num_accepted > 0) == species.drafts
