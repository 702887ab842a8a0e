"""Tree rules on ragged batches: whose rows are whose, chains, padding, rounding, refusals."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from test_acceptance import SIZE, ragged
from torch import Tensor

from forerun.params import SamplingParams
from forerun.sampling import (
    FilterParams,
    Stream,
    accept_samples,
    accept_tokens,
    sample_tokens,
    uniforms,
)
from forerun.sampling.tree import TreeOutcome, TreeProposal, accept_tree_probs, accept_tree_samples
from forerun.types import Outcome, Proposal


def assert_outcome(
    outcome: TreeOutcome, paths: list[list[int]], num_accepted: list[int], next_tokens: list[int]
) -> None:
    assert outcome.paths.tolist() == paths
    assert outcome.num_accepted.tolist() == num_accepted
    assert outcome.next_tokens.tolist() == next_tokens
    assert outcome.paths.dtype == outcome.num_accepted.dtype == torch.int64
    assert outcome.next_tokens.dtype == torch.int64


def noise(*shape: int, value: float = 0.5) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


# --- proposals ---------------------------------------------------------------------------------


def test_lists_are_packed_behind_a_root():
    trees = TreeProposal.from_lists([[5, 6, 7], [], [8]], [[0, 0, 1], [], [0]])
    assert trees.tokens.tolist() == [[0, 5, 6, 7], [0, 0, 0, 0], [0, 8, 0, 0]]
    assert trees.parents.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert trees.lengths.tolist() == [3, 0, 1]
    assert trees.depths.tolist() == [[0, 1, 1, 2], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert (trees.max_depth, trees.max_children) == (2, 2)
    assert trees.probs is None


def test_padding_counts_neither_as_depth_nor_as_children():
    trees = TreeProposal.from_lists([[5], [1, 2, 3, 4]], [[0], [0, 1, 2, 3]])
    assert (trees.max_depth, trees.max_children) == (4, 1)
    assert trees.depths.tolist() == [[0, 1, 0, 0, 0], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("num_requests", [0, 2])
def test_no_nodes_make_no_tree(num_requests: int):
    trees = TreeProposal.from_lists([[]] * num_requests, [[]] * num_requests)
    assert trees.tokens.shape == trees.depths.shape == (num_requests, 1)
    assert (trees.max_depth, trees.max_children) == (0, 0)


@pytest.mark.parametrize(
    ("tokens", "parents", "says"),
    [
        ([[1], [2]], [[0]], "2 requests have tokens, 1 have parents"),
        ([[], [1, 2]], [[], [0]], "request 1 has 2 tokens and 1 parents"),
        ([[4, -1]], [[0, 0]], "request 0, node 2: token -1 is negative"),
        ([[4, 5]], [[0, 2]], "request 0, node 2: parent 2 does not come before it, see 0..1"),
        ([[4, 5]], [[1, 0]], "request 0, node 1: parent 1 does not come before it, see 0..0"),
        ([[4]], [[-1]], "request 0, node 1: parent -1 does not come before it, see 0..0"),
        (
            [[4, 5, 4]],
            [[0, 1, 0]],
            "request 0, node 3: token 4 is also that of its sibling, node 1",
        ),
    ],
)
def test_what_is_no_tree_is_refused_with_numbers(tokens, parents, says: str):
    with pytest.raises(ValueError, match=re.escape(says)):
        TreeProposal.from_lists(tokens, parents)


def test_cousins_may_have_the_same_token():
    trees = TreeProposal.from_lists([[4, 4, 5, 4]], [[0, 1, 0, 3]])
    assert trees.depths.tolist() == [[0, 1, 2, 1, 2]]


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((1, 2, 9), "probs is (1, 2, 9), must be (1, 3, V)"),
        ((1, 3), "probs is (1, 3), must be (1, 3, V)"),
        ((1, 3, 8), "token 8 is outside the vocabulary of 8 in probs"),
    ],
)
def test_probs_that_do_not_fit_are_refused_with_numbers(shape: tuple[int, ...], says: str):
    with pytest.raises(ValueError, match=re.escape(says)):
        TreeProposal.from_lists([[8, 3]], [[0, 0]], torch.zeros(shape))


def test_rows_and_noise_that_do_not_fit_are_refused_with_numbers():
    trees = TreeProposal.from_lists([[5, 6, 7], []], [[0, 0, 1], []])
    rows = re.escape("the target has 4 rows for 5 nodes, roots included")
    with pytest.raises(ValueError, match=rows):
        accept_tree_samples(torch.zeros(4, dtype=torch.int64), trees)
    with pytest.raises(ValueError, match=rows):
        accept_tree_probs(torch.ones(4, SIZE), trees, noise(2, 2, 2), noise(2))
    for levels, trials in [(1, 2), (2, 1)]:
        with pytest.raises(ValueError, match=re.escape("give at least (2, 2, 2)")):
            accept_tree_probs(torch.ones(5, SIZE), trees, noise(2, levels, trials), noise(2))


# --- walking along samples ---------------------------------------------------------------------


def test_the_walk_goes_where_the_samples_go():
    trees = TreeProposal.from_lists(
        [[5, 6, 7, 8], [], [5, 6]], [[0, 0, 2, 2], [], [0, 0]]
    )  # rows: 0..4, 5, 6..8
    samples = torch.tensor([6, 1, 8, 2, 3, 4, 9, 1, 1])
    assert_outcome(
        accept_tree_samples(samples, trees), [[2, 4], [0, 0], [0, 0]], [2, 0, 0], [3, 4, 9]
    )


def test_a_match_elsewhere_in_the_tree_counts_for_nothing():
    """The sample after node 1 is the token of node 2's child."""
    trees = TreeProposal.from_lists([[5, 6, 7]], [[0, 0, 2]])
    assert_outcome(accept_tree_samples(torch.tensor([5, 7, 7, 1]), trees), [[1, 0]], [1], [7])


def test_padding_never_matches():
    """The smaller tree is padded with 0 under the root, which is also the sample there."""
    trees = TreeProposal.from_lists([[5], [0, 0, 0]], [[0], [0, 1, 2]])
    outcome = accept_tree_samples(torch.zeros(6, dtype=torch.int64), trees)
    assert_outcome(outcome, [[0, 0, 0], [1, 2, 3]], [0, 3], [0, 0])


def test_empty_trees_are_plain_decoding():
    trees = TreeProposal.from_lists([[]] * 3, [[]] * 3)
    nothing = [[], [], []]
    outcome = accept_tree_samples(torch.tensor([4, 5, 6]), trees)
    assert_outcome(outcome, nothing, [0] * 3, [4, 5, 6])
    outcome = accept_tree_probs(torch.eye(SIZE)[[4, 5, 6]], trees, noise(3, 0, 0), noise(3))
    assert_outcome(outcome, nothing, [0] * 3, [4, 5, 6])


def test_no_requests_give_no_outcome():
    trees = TreeProposal.from_lists([], [])
    assert_outcome(accept_tree_samples(torch.zeros(0, dtype=torch.int64), trees), [], [], [])
    assert_outcome(
        accept_tree_probs(torch.zeros(0, SIZE), trees, noise(0, 0, 0), noise(0)), [], [], []
    )


# --- a chain is a tree -------------------------------------------------------------------------


def as_trees(chains: Proposal) -> TreeProposal:
    """Say the same as trees: node i + 1 is draft token i and its parent is node i."""
    size, width = chains.tokens.shape
    index = torch.arange(width + 1)
    parents = torch.where(index <= chains.lengths[:, None], (index - 1).clamp_min(0), 0)
    tokens = torch.nn.functional.pad(chains.tokens, (1, 0))
    probs = chains.probs
    if probs is not None:
        probs = torch.cat([probs, torch.full((size, 1, probs.shape[2]), 7.0)], dim=1)
    return TreeProposal(tokens, parents, chains.lengths, probs)


def assert_same(tree: TreeOutcome, chain: Outcome) -> None:
    assert torch.equal(tree.num_accepted, chain.num_accepted)
    assert torch.equal(tree.next_tokens, chain.next_tokens)
    index = torch.arange(tree.paths.shape[1])
    kept = index < chain.num_accepted[:, None]
    assert torch.equal(tree.paths, torch.where(kept, index + 1, 0))


@pytest.mark.parametrize("lengths", [[3, 0, 1, 5, 2, 0, 4], [1], [0, 2]])
@pytest.mark.parametrize("deterministic", [False, True])
def test_on_chains_trials_equal_the_token_rule(lengths: list[int], deterministic: bool):
    total = 0
    for seed in range(60):
        probs, chains, accept, recover = ragged(lengths, seed)
        if deterministic:
            chains = Proposal(chains.tokens, chains.lengths, None)
        chain = accept_tokens(probs, chains, accept, recover)
        assert_same(accept_tree_probs(probs, as_trees(chains), accept[..., None], recover), chain)
        total += int(chain.num_accepted.sum())
    assert total > 2


def test_on_chains_the_walk_equals_the_samples_rule():
    rng = random.Random(1)
    total = 0
    for _ in range(200):
        drafts = [
            [rng.randrange(2) for _ in range(rng.randrange(5))] for _ in range(rng.randrange(7))
        ]
        samples = torch.tensor([rng.randrange(2) for d in drafts for _ in [0, *d]]).long()
        chains = Proposal.from_lists(drafts)
        chain = accept_samples(samples, chains)
        assert_same(accept_tree_samples(samples, as_trees(chains)), chain)
        total += int(chain.num_accepted.sum())
    assert total > 100


# --- batches -----------------------------------------------------------------------------------


def random_trees(seed: int, lengths: list[int]) -> tuple[Tensor, TreeProposal, Tensor, Tensor]:
    """Random trees with zeros in their distributions, and garbage where nobody should look."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def dists(*shape: int) -> Tensor:
        weights = torch.rand(*shape, SIZE, generator=generator) ** 3
        weights = weights * (torch.rand(*shape, SIZE, generator=generator) > 0.3)
        weights[..., 0] += 0.01
        return weights / weights.sum(-1, keepdim=True)

    q = dists(len(lengths), max(lengths) + 1)
    tokens, parents = [], []
    for b, length in enumerate(lengths):
        above = [rng.randrange((n + 1) // 2) for n in range(1, length + 1)]
        left = [q[b, n].tolist() for n in range(length + 1)]
        drawn = []
        for parent in above:
            if not any(left[parent]):
                left[parent] = [float(v == 0) for v in q[b, parent]]
            drawn.append(rng.choices(range(SIZE), left[parent])[0])
            left[parent][drawn[-1]] = 0.0
        tokens.append(drawn)
        parents.append(above)
    trees = TreeProposal.from_lists(tokens, parents, q)
    rows = torch.cat([q[b, : length + 1] for b, length in enumerate(lengths)])
    target = (rows + dists(len(rows))) / 2
    leaves = torch.ones_like(trees.parents, dtype=torch.bool)
    leaves.scatter_(-1, trees.parents, False)
    q[leaves] = torch.nan
    accept = torch.rand(
        len(lengths), trees.max_depth, trees.max_children, generator=generator, dtype=torch.float64
    )
    recover = torch.rand(len(lengths), generator=generator, dtype=torch.float64)
    return target, trees, accept, recover


def alone(trees: TreeProposal, b: int, deterministic: bool = False) -> TreeProposal:
    length = int(trees.lengths[b])
    tokens, parents = trees.tokens[b, 1 : length + 1], trees.parents[b, 1 : length + 1]
    probs = None if deterministic else trees.probs[b : b + 1, : length + 1]
    return TreeProposal.from_lists([tokens.tolist()], [parents.tolist()], probs)


@pytest.mark.parametrize("deterministic", [False, True])
def test_requests_do_not_see_each_other(deterministic: bool):
    lengths = [6, 0, 1, 9, 4, 0, 3]
    seen, later_children = set(), 0
    for seed in range(15):
        probs, trees, accept, recover = random_trees(seed, lengths)
        if deterministic:
            both = TreeProposal(trees.tokens, trees.parents, trees.lengths, None)
            together = accept_tree_probs(probs, both, accept, recover)
        else:
            together = accept_tree_probs(probs, trees, accept, recover)
        samples = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(seed))[:, 0]
        walked = accept_tree_samples(samples, trees)
        start = 0
        for b, length in enumerate(lengths):
            rows, one = slice(start, start + length + 1), alone(trees, b, deterministic)
            depth, trials = one.max_depth, one.max_children
            apart = accept_tree_probs(
                probs[rows], one, accept[b : b + 1, :depth, :trials], recover[b : b + 1]
            )
            for batch, single in [
                (together, apart),
                (walked, accept_tree_samples(samples[rows], one)),
            ]:
                assert single.paths[0].tolist() == batch.paths[b, :depth].tolist()
                assert not batch.paths[b, depth:].any()
                assert single.num_accepted == batch.num_accepted[b]
                assert single.next_tokens == batch.next_tokens[b]
            path = apart.paths[0, : int(apart.num_accepted)].tolist()
            for above, node in zip([0, *path], path, strict=False):
                later_children += int((trees.parents[b, 1:node] == above).any())
            seen.add((length, len(path)))
            start += length + 1
    assert {(9, n) for n in range(3)} <= seen
    assert later_children > 2


def test_emitted_tokens_are_possible():
    """Every token on the path and the next one have p > 0 after what comes before them."""
    for seed in range(30):
        lengths = [6, 0, 1, 9]
        probs, trees, accept, recover = random_trees(seed, lengths)
        outcome = accept_tree_probs(probs, trees, accept, recover)
        start = 0
        for b, length in enumerate(lengths):
            path = outcome.paths[b, : outcome.num_accepted[b]].tolist()
            tokens = [*trees.tokens[b, path].tolist(), int(outcome.next_tokens[b])]
            for node, token in zip([0, *path], tokens, strict=True):
                assert probs[start + node, token] > 0
            start += length + 1


# --- rounding and edges ------------------------------------------------------------------------


def test_a_token_that_the_target_excludes_never_survives():
    """Not even at noise 0; and its sibling, all of the residual, does at the highest noise."""
    target = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    trees = TreeProposal.from_lists(
        [[0, 1]], [[0, 0]], torch.tensor([[[0.9, 0.1, 0.0]]]).expand(1, 3, 3)
    )
    accept = torch.tensor([[[0.0, 1 - 2.0**-53]]], dtype=torch.float64)
    assert_outcome(accept_tree_probs(target, trees, accept, noise(1)), [[2]], [1], [2])


def test_rounding_that_leaves_no_residual_goes_on_with_the_target():
    """Here p is q but for its last bit, and the noise is as close to 1 as it gets."""
    p = torch.tensor([[0.25, 0.25, 0.5]] * 3)
    q = p[:1].nextafter(torch.tensor(1.0)).expand(1, 3, 3)
    high = 1 - 2.0**-53
    trees = TreeProposal.from_lists([[2, 1]], [[0, 0]], q)
    # the second trial: p(1) = 1/4 against q(1) = 1/2
    for second, path in [(0.499, [[2]]), (0.501, [[0]])]:
        accept = torch.tensor([[[high, second]]], dtype=torch.float64)
        outcome = accept_tree_probs(p, trees, accept, noise(1, value=high))
        assert_outcome(outcome, path, [int(second < 0.5)], [2])


def test_a_draft_almost_certain_of_one_token_keeps_its_precision():
    """All of q but 2^-40 is struck out; what is left is as good a distribution as any."""
    rest = 2.0**-40
    q = torch.tensor([[[1.0, 3 * rest, rest]]]).expand(1, 3, 3)
    p = torch.tensor([[0.0, 0.5, 0.5]] * 3)
    trees = TreeProposal.from_lists([[0, 1]], [[0, 0]], q)
    # p(1) = 1/2 against q(1) = 3/4: two in three
    for second, path in [(0.666, [[2]]), (0.667, [[0]])]:
        accept = torch.tensor([[[0.5, second]]], dtype=torch.float64)
        outcome = accept_tree_probs(p, trees, accept, noise(1, value=0.1))
        assert outcome.paths.tolist() == path
    assert_outcome(outcome, [[0]], [0], [2])  # the residual is all on token 2


def test_a_used_up_draft_is_certain_of_the_children_that_follow():
    q = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]).expand(1, 4, 4)
    p = torch.tensor([[0.2, 0.2, 0.3, 0.3]] * 4)
    trees = TreeProposal.from_lists([[0, 1, 2]], [[0, 0, 0]], q)
    # 1 in 5 keeps token 0, then 1 in 4 token 1, then 1 in 2 token 2, then it is token 3
    for u, path in [
        ([0.19, 0.9, 0.9], [[1]]),
        ([0.21, 0.24, 0.9], [[2]]),
        ([0.21, 0.26, 0.49], [[3]]),
        ([0.21, 0.26, 0.51], [[0]]),
    ]:
        accept = torch.tensor([[u]], dtype=torch.float64)
        outcome = accept_tree_probs(p, trees, accept, noise(1))
        assert outcome.paths.tolist() == path
    assert_outcome(outcome, [[0]], [0], [3])


def test_all_of_the_vocabulary_as_children_leaves_nothing_to_recover():
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(5, 4, generator=generator).softmax(-1)
    for q in (None, torch.rand(1, 5, 4, generator=generator).softmax(-1)):
        trees = TreeProposal.from_lists([[3, 1, 0, 2]], [[0] * 4], q)
        for _ in range(50):
            accept = torch.rand(1, 1, 4, generator=generator, dtype=torch.float64)
            accept[..., -1] = 1 - 1e-9
            assert int(accept_tree_probs(p, trees, accept, noise(1)).num_accepted) == 1


# --- seeds -------------------------------------------------------------------------------------


def test_seeded_tokens_are_the_same_with_and_without_trees():
    """Whatever is guessed, however wide, the tokens are those of plain decoding."""
    table = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(2)) * 1.5
    params = SamplingParams(temperature=0.9, top_k=7, top_p=0.95)
    seed, length = 17, 60

    def sample(contexts: list[int], positions: list[int]) -> Tensor:  # after tokens, for positions
        seeds = np.full(len(contexts), seed, np.uint64)
        filters = FilterParams.from_params([params] * len(contexts))
        at = np.array(positions, np.int64)
        return sample_tokens(table[contexts], filters, uniforms(seeds, at, Stream.TARGET))

    plain = [3]
    while len(plain) < length:
        plain.append(int(sample(plain[-1:], [len(plain)])))
    rng = random.Random(4)
    text, num_accepted, num_steps = [3], 0, 0
    while len(text) < length:
        tokens: list[int] = []
        parents: list[int] = []
        for parent in range(rng.randint(1, 6)):
            if parent <= len(tokens):
                children = rng.sample(range(SIZE), rng.randint(0, 6))
                tokens += children
                parents += [parent] * len(children)
        trees = TreeProposal.from_lists([tokens], [parents])
        positions = (trees.depths[0] + len(text)).tolist()
        outcome = accept_tree_samples(sample([text[-1], *tokens], positions), trees)
        n = int(outcome.num_accepted)
        text += [tokens[node - 1] for node in outcome.paths[0, :n].tolist()]
        text.append(int(outcome.next_tokens))
        num_accepted, num_steps = num_accepted + n, num_steps + 1
    assert text[:length] == plain
    assert num_accepted > 10
