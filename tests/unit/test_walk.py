"""The walk down a draft tree in the engine equals the rule that is told in tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.verify import _walk
from forerun.sampling.tree import TreeProposal, accept_tree_samples


@st.composite
def trees(draw):
    """Draw a tree over four tokens, and what the target samples after the root and each node."""
    tokens, parents = [], []
    for node in range(draw(st.integers(0, 9))):
        parent = draw(st.integers(0, node))
        free = {0, 1, 2, 3} - {
            token for token, above in zip(tokens, parents, strict=True) if above == parent
        }
        if free:
            tokens.append(draw(st.sampled_from(sorted(free))))
            parents.append(min(parent, len(parents)))
    # A parent that was cut above may have given two siblings one token: drop those.
    seen, kept = set(), []
    for token, parent in zip(tokens, parents, strict=True):
        if (parent, token) not in seen:
            seen.add((parent, token))
            kept.append((token, min(parent, len(kept))))
    pairs = list(dict.fromkeys(kept))
    samples = [draw(st.integers(0, 3)) for _ in range(len(pairs) + 1)]
    return [token for token, _ in pairs], [parent for _, parent in pairs], samples


@given(trees())
def test_the_walk_is_the_rules(drawn):
    tokens, parents, samples = drawn
    found = _walk(samples, tokens, parents)
    outcome = accept_tree_samples(
        torch.tensor(samples), TreeProposal.from_lists([tokens], [parents])
    )
    count = int(outcome.num_accepted[0])
    assert found.num_accepted == count
    assert list(found.path) == outcome.paths[0, :count].tolist()
    assert found.tokens[-1] == int(outcome.next_tokens[0])
    assert list(found.tokens[:-1]) == [tokens[node - 1] for node in found.path]
