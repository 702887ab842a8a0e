"""Sampled drafts of a draft model: what it drew from is what it says, and the output is exact."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from reference.filters_slow import filtered_row
from reference.outputs import SIGMA5, p_value
from reference.plain import PlainLlama, next_probs
from reference.tiny_draft import DraftBench, save_shaken
from reference.tiny_engine import Bench

from forerun.draft import model
from forerun.engine.drafts import find_fault, read_drafts
from forerun.params import SamplingParams
from forerun.sampling import RULES
from forerun.types import Proposal

PROMPT = [3, 1, 4, 1, 5]
LENGTH = 3
FILTERED = {"temperature": 0.8, "top_k": 10, "top_p": 0.95, "min_p": 0.02}
OPEN = {"temperature": 1.0}


@pytest.fixture(scope="module")
def narrow_draft(narrow, tmp_path_factory):
    return save_shaken(tmp_path_factory.mktemp("narrow_draft") / "model", narrow.folder, 0.1)


@pytest.fixture(scope="module")
def shaken(tiny, tmp_path_factory):
    return save_shaken(tmp_path_factory.mktemp("shaken") / "model", tiny.folder, 0.05)


def sample(narrow, draft, mix, num_trials, rule="auto"):
    """Generate once per seed through the live engine: outputs, and what was accepted."""
    options = {} if rule == "auto" else {"choose": lambda _: RULES[rule]}
    bench = DraftBench(
        narrow.folder, draft, max_draft=2, draft_sampling="sampled", kernels="compiled",
        block_size=32, max_num_seqs=1024, max_num_batched_tokens=8192, max_model_len=32,
        kv_cache_tokens=1 << 17, **options,
    )  # fmt: skip
    for each in (bench.core, bench.drafter.cache):  # checked elsewhere; it takes all the time here
        each.check_integrity = lambda: None
    bench.watched.seen = _Nowhere()
    batch = [
        SamplingParams(**mix, seed=seed, max_tokens=LENGTH, ignore_eos=True)
        for seed in range(num_trials)
    ]
    generated = bench.generate([PROMPT] * num_trials, batch)
    assert all(each.stats.drafter_faults == {} for each in generated)
    counts = Counter(tuple(each.token_ids) for each in generated)
    return counts, bench.accepted / bench.drafted


class _Nowhere(list):
    def append(self, each):
        """Keep nothing: there are thousands."""


def exact(narrow, mix):
    params = SamplingParams(**mix, seed=0)
    joint = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for output, p in joint.items():
            row = next_probs(narrow.model, [*PROMPT, *output], params)
            longer |= {(*output, token): p * q for token, q in enumerate(row) if q > 0}
        joint = longer
    return joint


def check(counts, joint):
    return min(p_value(counts, joint, num_positions) for num_positions in (1, 2, 3))


@pytest.mark.parametrize(
    ("mix", "rule", "num_trials"),
    [
        pytest.param(OPEN, "auto", 20_480, marks=pytest.mark.slow, id="open, block"),
        pytest.param(OPEN, "token", 20_480, marks=pytest.mark.slow, id="open, token"),
        pytest.param(FILTERED, "auto", 20_480, marks=pytest.mark.slow, id="filtered, block"),
        pytest.param(FILTERED, "auto", 4096, id="filtered, block, fewer"),
        pytest.param(FILTERED, "token", 4096, id="filtered, token, fewer"),
    ],
)
def test_the_output_has_the_targets_distribution(narrow, narrow_draft, mix, rule, num_trials):
    counts, accepted_rate = sample(narrow, narrow_draft, mix, num_trials, rule)
    assert 0.3 < accepted_rate < 0.95, "accepting and rejecting must both happen"
    assert check(counts, exact(narrow, mix)) > SIGMA5


def says_other_odds(right):
    """A wrong drafter that was shipped: q is of the raw logits, the sample of the filtered ones."""

    def pick(logits, requests, place):
        tokens, _, bad = right(logits, requests, place)
        return tokens, logits.softmax(-1), bad

    return pick


def draws_the_likeliest(right):
    """A wrong drafter that was shipped: it takes the likeliest token and says that it drew it."""

    def pick(logits, requests, place):
        _, probs, bad = right(logits, requests, place)
        return probs.argmax(-1).tolist(), probs, bad

    return pick


@pytest.mark.parametrize("wrong", [says_other_odds, draws_the_likeliest])
def test_a_drafter_that_lies_about_its_odds_is_noticed(narrow, narrow_draft, wrong, monkeypatch):
    monkeypatch.setattr(model, "pick_sample", wrong(model.pick_sample))
    mix = {"temperature": 0.6, "top_k": 12}
    counts, _ = sample(narrow, narrow_draft, mix, 4096)
    assert check(counts, exact(narrow, mix)) < SIGMA5


MIXES = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 8},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0},
]


def mixed(max_tokens=16):
    return [
        SamplingParams(**mix, seed=10 + index, max_tokens=max_tokens)
        for index, mix in enumerate(MIXES)
    ]


def keep_proposals(bench):
    """Note each proposal with its requests' tokens at that time."""
    kept, propose = [], bench.drafter.propose

    def noting(requests):
        proposal = propose(requests)
        kept.append(([(each, list(each.tokens)) for each in requests], proposal))
        return proposal

    bench.drafter.propose = noting
    return kept


def test_it_says_what_it_drew_from(tiny, prompts, shaken):
    """Each row is the slow twin's distribution of the draft model, after the request's filters."""
    twin = PlainLlama(shaken)
    bench = DraftBench(tiny.folder, shaken, max_draft=3, draft_sampling="sampled")
    kept = keep_proposals(bench)
    bench.generate(prompts[:5], mixed())
    num_rows = 0
    for requests, proposal in kept:
        for row, (request, tokens) in enumerate(requests):
            length = int(proposal.lengths[row])
            params = request.params
            if params.temperature == 0:
                assert proposal.probs is None or not proposal.probs[row].any()
                continue
            assert length == request.max_draft, "a length chosen by what was drawn"
            draft = proposal.tokens[row, :length].tolist()
            for place in range(length):
                logits = twin.next_logits([*tokens, *draft[:place]])
                want = filtered_row(
                    logits, params.temperature, params.top_k, params.top_p, params.min_p
                ).probs
                got = proposal.probs[row, place]
                assert torch.allclose(got, torch.tensor(want), atol=1e-5)
                assert got[draft[place]] > 0
                num_rows += 1
    assert num_rows > 50
    assert 0 < bench.accepted < bench.drafted


def test_greedy_requests_in_the_same_batch_stay_plain(tiny, prompts, shaken, monkeypatch):
    monkeypatch.setattr(model, "RATE", 0.0)
    bench = DraftBench(tiny.folder, shaken, draft_sampling="sampled")
    batch = mixed()
    generated = bench.generate(prompts[:5], batch)
    want = tiny.plain(prompts[4], batch[4])
    assert tuple(generated[4].token_ids) == want.token_ids
    assert all(each.stats.drafter_faults == {} for each in generated)
    assert all(each.stats.num_drafted > 0 for each in generated)
    assert generated[4].stats.num_accepted > 0


def test_drafts_are_the_same_in_any_company(tiny, prompts, shaken):
    """Their noise is keyed by the request's seed and position, like all noise."""
    batch = mixed()
    options = {"max_draft": 3, "draft_sampling": "sampled"}
    together = DraftBench(tiny.folder, shaken, **options)
    together.generate(prompts[:5], batch)
    for index, (prompt, params) in enumerate(zip(prompts, batch, strict=False)):
        alone = DraftBench(tiny.folder, shaken, **options)
        got = alone.generate([prompt], params)[0]
        assert got.token_ids == together.seen[index].token_ids
    other = DraftBench(tiny.folder, shaken, **options)
    reseeded = [SamplingParams(**mix, seed=99, max_tokens=16) for mix in MIXES[:4]]
    other.generate(prompts[:4], reseeded)
    assert [each.token_ids for each in other.seen] != [each.token_ids for each in together.seen[:4]]


def test_where_nothing_can_be_drawn_a_sampled_draft_is_empty(tiny, prompts, shaken):
    """Prompts in pieces leave some without; that was decided before anything was drawn."""
    bench = DraftBench(
        tiny.folder, shaken, draft_sampling="sampled", max_num_batched_tokens=24, max_num_seqs=8
    )
    batch = [SamplingParams(seed=index, max_tokens=16) for index in range(len(prompts))]
    generated = bench.generate(prompts, batch)
    assert all(each.stats.drafter_faults == {} for each in generated)
    lengths = {len(draft) for request, _, draft in bench.watched.seen if request.max_draft == 5}
    assert lengths == {0, 5}
    assert bench.accepted > 0


def test_near_the_end_of_its_context_it_draws_nothing(tiny, prompts, tmp_path, shaken):
    params = SamplingParams(seed=3, max_tokens=None)
    bench = DraftBench(tiny.folder, shaken, max_draft=6, draft_sampling="sampled", max_model_len=64)
    bench.generate(prompts[:2], params)
    for each in bench.seen:
        assert each.stats.drafter_faults == {}
        assert len(each.request.tokens) == 64
    assert bench.accepted > 0


def test_a_draw_that_breaks_the_draft_model_is_not_dropped(tiny, prompts, shaken, caplog):
    """Its draft keeps its length, and says what it drew from: dropping it would move the output."""
    bench = DraftBench(tiny.folder, shaken, max_draft=4, draft_sampling="sampled")
    kept = keep_proposals(bench)
    likely = [SamplingParams(temperature=0.3, seed=seed, max_tokens=24) for seed in range(8)]
    plain = DraftBench(tiny.folder, shaken, max_draft=4, draft_sampling="sampled")
    plain.generate([prompts[0]] * 8, likely)
    often = [draft[0] for _, _, draft in plain.watched.seen if draft]
    odd = next(token for token, _ in Counter(often).most_common() if token not in prompts[0])
    bench.drafter._network.decoder._embedding[odd] = torch.nan
    generated = bench.generate([prompts[0]] * 8, likely)
    broken = 0
    for requests, proposal in kept:
        for row, (request, _) in enumerate(requests):
            length = int(proposal.lengths[row])
            assert length in (0, request.max_draft)
            draft = proposal.tokens[row, :length].tolist()
            if odd in draft[:-1]:
                after = draft.index(odd) + 1
                assert draft[after:] == [0] * (length - after)
                assert proposal.probs[row, after:length, 0].tolist() == [1.0] * (length - after)
                broken += 1
    assert broken > 0
    # Only who committed that token is given up.
    for each in generated:
        faults = each.stats.drafter_faults
        assert faults in ({}, {"propose_failed": 1})
        if faults:
            assert odd in each.token_ids
    assert any(each.stats.drafter_faults for each in generated)
    assert not bench.drafter._network._passes.cache.values.isnan().any()


def test_seeds_and_temperature_zero_make_the_whole_engine_plain(tiny, prompts, shaken):
    bench = DraftBench(tiny.folder, shaken, draft_sampling="sampled")
    params = SamplingParams(temperature=0, max_tokens=20)
    want = [each.token_ids for each in Bench(tiny.folder).generate(prompts, params)]
    assert [each.token_ids for each in bench.generate(prompts, params)] == want


def test_a_row_of_zeros_draws_nothing():
    """Sampled, deterministic and empty drafts in one proposal, told apart."""
    probs = torch.zeros(4, 2, 3)
    probs[0, :, 1] = 1.0
    probs[3, 0, 1] = 1.0
    tokens = torch.tensor([[1, 1], [2, 2], [0, 0], [1, 0]])
    drafts = read_drafts(Proposal(tokens, torch.tensor([2, 1, 0, 1]), probs), 4)
    assert [draft.probs is None for draft in drafts] == [False, True, True, False]
    assert [find_fault(draft, 2, 3) for draft in drafts] == [
        None, None, None, "length_chosen_after_sampling",
    ]  # fmt: skip
