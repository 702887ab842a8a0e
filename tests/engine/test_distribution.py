"""The distribution that comes out of the live engine, by chi-square, with controls that must fail.

Model, filters, noise, acceptance and commit are the real ones; only the drafter is a fake, which
guesses plausibly, so that about half of its guesses are accepted. The exact distribution comes from
the slow twin: its own forward pass, its own filters.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from reference.drafters import Fake
from reference.outputs import SIGMA5, p_value
from reference.plain import next_probs
from reference.tiny_engine import Bench
from scipy import stats

from forerun.engine import verify
from forerun.params import SamplingParams
from forerun.sampling import filtered_probs, rules
from forerun.types import Outcome

NUM_TRIALS = 20_480
PROMPT = [3, 1, 4, 1, 5]
LENGTH = 3
FILTERED = {"temperature": 0.8, "top_k": 10, "top_p": 0.95, "min_p": 0.02}
OPEN = {"temperature": 1.0}


class Plausible(Fake):
    """Two likely tokens: the first or second most probable, by the last token's parity."""

    def __init__(self, model) -> None:
        self.model = model
        self.known: dict[tuple[int, ...], int] = {}

    def guess(self, request):
        tokens = list(request.tokens)
        for _ in range(min(2, request.max_draft)):
            tokens.append(self.likely(tuple(tokens)))
        return tokens[len(request.tokens) :]

    def likely(self, tokens):
        if tokens not in self.known:
            row = torch.tensor(self.model.next_logits(tokens))
            self.known[tokens] = int(row.topk(2).indices[tokens[-1] % 2])
        return self.known[tokens]


def sample(narrow, mix, num_trials=NUM_TRIALS):
    """Generate once per seed, and count the outputs and what was accepted."""
    bench = Bench(
        narrow.folder, Plausible(narrow.model), max_draft=2, kernels="compiled", block_size=32,
        max_num_seqs=1024, max_num_batched_tokens=8192, max_model_len=32, kv_cache_tokens=1 << 15,
    )  # fmt: skip
    bench.core.check_integrity = lambda: None  # checked elsewhere; here it would take all the time
    batch = [
        SamplingParams(**mix, seed=seed, max_tokens=LENGTH, ignore_eos=True)
        for seed in range(num_trials)
    ]
    generated = bench.generate([PROMPT] * num_trials, batch)
    counts = Counter(tuple(each.token_ids) for each in generated)
    drafted = sum(each.request.counters.num_drafted for each in generated)
    accepted = sum(each.request.counters.num_accepted for each in generated)
    return counts, accepted / drafted


def exact(narrow, mix):
    """Compute the probability of every output from the slow twin."""
    params = SamplingParams(**mix, seed=0)
    joint = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for output, p in joint.items():
            row = next_probs(narrow.model, [*PROMPT, *output], params)
            longer |= {(*output, token): p * q for token, q in enumerate(row) if q > 0}
        joint = longer
    return joint


@pytest.mark.parametrize(
    ("mix", "num_trials"),
    [
        pytest.param(OPEN, NUM_TRIALS, marks=pytest.mark.slow, id="open"),
        pytest.param(FILTERED, NUM_TRIALS, marks=pytest.mark.slow, id="filtered"),
        pytest.param(FILTERED, NUM_TRIALS // 4, id="filtered, fewer"),
    ],
)
def test_the_output_has_the_targets_distribution(narrow, mix, num_trials):
    (counts, accepted_rate), joint = sample(narrow, mix, num_trials), exact(narrow, mix)
    assert 0.15 < accepted_rate < 0.85, "accepting and rejecting must both happen"
    for num_positions in (1, 2, 3):
        assert p_value(counts, joint, num_positions) > SIGMA5


def by_threshold(monkeypatch):
    """A wrong rule: keep a draft token whenever the target finds it at all likely."""
    seen = {}

    def sample_and_remember(logits, params, uniforms):
        seen["probs"] = filtered_probs(logits, params)
        return right_sample(logits, params, uniforms)

    def accept(samples, proposal):
        starts = (proposal.lengths + 1).cumsum(0) - (proposal.lengths + 1)
        kept = []
        for row, (draft, length) in enumerate(
            zip(proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True)
        ):
            likely = [seen["probs"][int(starts[row]) + i, draft[i]] > 0.1 for i in range(length)]
            kept.append([*likely, False].index(False))
        num_accepted = torch.tensor(kept)
        return Outcome(num_accepted, samples[starts + num_accepted])

    monkeypatch.setattr(rules, "sample_tokens", sample_and_remember)
    monkeypatch.setattr(rules, "accept_samples", accept)


def accept_all(monkeypatch):
    """A wrong rule that was shipped: every draft token is kept."""

    def accept(samples, proposal):
        ends = (proposal.lengths + 1).cumsum(0) - 1
        return Outcome(proposal.lengths.clone(), samples[ends])

    monkeypatch.setattr(rules, "accept_samples", accept)


def next_of_another_row(monkeypatch):
    """The right count, but the next token is the sample of the row after the last draft."""

    def accept(samples, proposal):
        right = right_accept(samples, proposal)
        return Outcome(right.num_accepted, samples[(proposal.lengths + 1).cumsum(0) - 1])

    monkeypatch.setattr(rules, "accept_samples", accept)


def one_noise_for_a_block(monkeypatch):
    """One uniform for all rows of a block: each token alone is right, two together are not."""

    def positions(plan, proposal):
        right = torch.from_numpy(right_positions(plan, proposal))
        rows = [length + 1 for length in proposal.lengths.tolist()]
        starts = torch.tensor([0, *rows]).cumsum(0)[:-1]
        return right[starts].repeat_interleave(torch.tensor(rows)).numpy()

    monkeypatch.setattr(verify, "row_positions", positions)


right_sample = rules.sample_tokens
right_accept = rules.accept_samples
right_positions = verify.row_positions
WRONG = [by_threshold, accept_all, next_of_another_row, one_noise_for_a_block]


@pytest.mark.parametrize("control", WRONG)
def test_a_wrong_rule_is_noticed(narrow, control, monkeypatch):
    control(monkeypatch)
    (counts, _), joint = sample(narrow, OPEN, num_trials=6144), exact(narrow, OPEN)
    assert min(p_value(counts, joint, num_positions) for num_positions in (1, 2)) < SIGMA5


def test_the_check_sees_a_bias_of_two_percent(narrow):
    """Power: of biased outputs, expected counts and no luck, 2 % moved are seen at 3 sigma."""
    joint = exact(narrow, OPEN)
    first = Counter()
    for output, p in joint.items():
        first[output[0]] += p
    (top, _), (second, _) = first.most_common(2)
    moved = {(token,): p for token, p in first.items()}
    moved[(top,)] -= 0.02
    moved[(second,)] += 0.02
    counts = Counter({cell: round(p * NUM_TRIALS) for cell, p in moved.items()})
    assert p_value(counts, joint, 1) < float(stats.norm.sf(3))
