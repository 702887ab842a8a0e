"""Acceptance rules for draft trees: which path survives, and which token the target adds after it.

Pure functions of tensors, as in `acceptance`; nothing here drafts a tree or runs a model.

Layout: request b drafted lengths[b] nodes and owns lengths[b] + 1 consecutive rows of the target's
flat output; row i is the target's distribution after node i, row 0 after the root, which is the
last committed token. So a node's children are judged by that node's row.
Letters: T most nodes drafted for a request, D depth of the deepest node (the root has depth 0),
C most children of a node; p target, q draft, both distributions after the same filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .filters import UNIT, whole
from .sampler import sample_from_probs

__all__ = ["TreeOutcome", "TreeProposal", "accept_tree_probs", "accept_tree_samples"]

TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, slots=True)
class TreeProposal:
    """Draft trees of a batch: parents come before children, siblings in the order of trial.

    Siblings differ in their tokens. Sampled ones are drawn one after the other from the node's q
    without the earlier ones. Whether a node is drafted must not depend on its own token or on what
    was drawn after it: a sampled child that is left out for its value biases the output.
    """

    tokens: Tensor  # [B, T + 1] int64, right-padded with 0; column 0, the root, is not read
    parents: Tensor  # [B, T + 1] int64, node numbers, right-padded with 0; the root's is 0
    lengths: Tensor  # [B] int64, 0 <= length <= T, drafted nodes: the root is not counted
    probs: Tensor | None  # [B, T + 1, V] float32, q of each node's children; None: deterministic

    @staticmethod
    def from_lists(
        tokens: Sequence[Sequence[int]],  # of the drafted nodes 1, 2, ..., one list per request
        parents: Sequence[Sequence[int]],  # of the same nodes
        probs: Tensor | None = None,  # [B, T + 1, V] float32
    ) -> TreeProposal:
        """Pack and check trees; tokens [[5, 6, 7], []], parents [[0, 0, 1], []]: 7 follows 5."""
        if len(tokens) != len(parents):
            raise ValueError(f"{len(tokens)} requests have tokens, {len(parents)} have parents")
        for request, pair in enumerate(zip(tokens, parents, strict=True)):
            _check_tree(request, *pair)
        width = max((len(each) for each in tokens), default=0)
        if probs is not None:
            _check_probs(
                probs, len(tokens), width + 1, max(map(max, filter(None, tokens)), default=0)
            )
        shape = (len(tokens), width + 1)
        pad = [[0, *each, *[0] * (width - len(each))] for each in (*tokens, *parents)]
        packed = torch.tensor(pad, dtype=torch.int64).reshape(2, *shape)
        lengths = torch.tensor([len(each) for each in tokens], dtype=torch.int64)
        return TreeProposal(packed[0], packed[1], lengths, probs)

    @property
    def depths(self) -> Tensor:  # [B, T + 1] int64, 0 for the root and for padding
        """Count the drafted nodes from the root to each node; position = the root's + depth."""
        depths = torch.zeros_like(self.parents)
        above = self.nodes.masked_fill(~self.drafted, 0)  # [B, T + 1], climbs to the root
        while bool((above > 0).any()):
            depths += above > 0
            above = self.parents.gather(-1, above)
        return depths

    @property
    def nodes(self) -> Tensor:  # [B, T + 1] int64, each node's own number
        return torch.arange(self.parents.shape[1], device=self.parents.device).expand_as(
            self.parents
        )

    @property
    def drafted(self) -> Tensor:  # [B, T + 1] bool, neither the root nor padding
        return (self.nodes > 0) & (self.nodes <= self.lengths.unsqueeze(-1))

    @property
    def max_depth(self) -> int:
        return int(self.depths.max()) if len(self.lengths) else 0

    @property
    def max_children(self) -> int:
        counts = torch.zeros_like(self.parents).scatter_add_(-1, self.parents, self.drafted.long())
        return int(counts.max()) if len(self.lengths) else 0


@dataclass(frozen=True, slots=True)
class TreeOutcome:
    """What an acceptance rule decided for each request of a batch."""

    paths: Tensor  # [B, D] int64, numbers of the accepted nodes from the top, right-padded with 0
    num_accepted: Tensor  # [B] int64, draft tokens kept; the next token is not counted
    next_tokens: Tensor  # [B] int64, the token that the target adds: recovered or bonus


def accept_tree_samples(samples: Tensor, proposal: TreeProposal) -> TreeOutcome:  # [M] int64
    """Walk to the child that equals the target's own sample; the first sample without one is next.

    The rule for deterministic children (greedy: SpecInfer 2305.09781).
    Lossless for any sampler, since every emitted token is the target's own sample. For a request
    to keep its seed, noise is keyed by position: all nodes of one depth share it, which is no loss,
    as at most one of them is on the path.
    """
    starts = _starts(proposal, len(samples))
    at = torch.zeros_like(proposal.lengths)  # [B], the walk's node
    paths = at.new_zeros(len(at), proposal.max_depth)
    for depth in range(paths.shape[1]):
        equal = proposal.tokens == samples[starts + at].unsqueeze(-1)  # [B, T + 1]
        # siblings differ, so one child at most; a walk that found none finds none ever after
        child = ((_children(proposal, at) & equal) * proposal.nodes).sum(-1)  # [B], 0: none
        paths[:, depth] = child
        at = torch.where(child > 0, child, at)
    return TreeOutcome(paths, (paths > 0).sum(-1), samples[starts + at])


def accept_tree_probs(
    target_probs: Tensor,  # [M, V]
    proposal: TreeProposal,
    accept_noise: Tensor,  # [B, D, C] float64 in [0, 1), its own stream: depth of parent, trial
    recover_noise: Tensor,  # [B] float64 in [0, 1), its own stream
) -> TreeOutcome:
    """Recursive rejection sampling without replacement (Jeon et al. 2402.14160).

    At a node try its children in order: keep token x with probability min(1, p(x) / q(x)) and go
    there, else p <- norm(max(0, p - q)) and q <- q without x, renormalised. Where no child is left
    draw from p. Of deterministic children q is certain, of each in turn; and of those that follow
    when q is used up, since they cannot have been drawn. Noise is read only where the walk comes
    by, so position and trial may key it: what a step did not decide, it did not look at.
    """
    starts = _starts(proposal, len(target_probs))
    num_levels, num_trials = proposal.max_depth, proposal.max_children
    if accept_noise.shape[1] < num_levels or accept_noise.shape[2] < num_trials:
        raise ValueError(
            f"accept_noise is {tuple(accept_noise.shape)}; the trees are {num_levels} deep with up "
            f"to {num_trials} children: give at least ({len(starts)}, {num_levels}, {num_trials})"
        )
    each = torch.arange(len(starts), device=starts.device)  # [B]
    at = torch.zeros_like(proposal.lengths)  # [B], the walk's node
    ended = torch.zeros_like(at, dtype=torch.bool)  # [B]
    paths = at.new_zeros(len(at), num_levels)
    p = target_probs[starts].double()  # [B, V], of the next token if the walk ends here
    for depth in range(num_levels):
        if bool(ended.all()):
            break
        children = _children(proposal, at) & ~ended.unsqueeze(-1)  # [B, T + 1]
        trials = children.cumsum(-1)  # [B, T + 1], 1 at the first child
        child = torch.zeros_like(at)  # [B], where the walk goes on; 0: nowhere yet
        q = torch.zeros_like(p) if proposal.probs is None else proposal.probs[each, at].double()
        for trial in range(num_trials):
            node = (children & (trials == trial + 1)).long().mul(proposal.nodes).sum(-1)  # [B]
            open_ = (node > 0) & (child == 0)  # [B]
            if not bool(open_.any()):
                break
            x = proposal.tokens[each, node].unsqueeze(-1)  # [B, 1]
            if trial > 0:  # the first trial and the draw take p and q as they come
                p = torch.where(open_.unsqueeze(-1), _normalised(p), p)
                q = _normalised(q)
            used_up = q.amax(-1, keepdim=True) <= 0  # [B, 1]
            q = torch.where(used_up, torch.zeros_like(q).scatter_(-1, x, 1.0), q)
            # u < p / q without the division: q = 0 cannot be drawn, and p = 0 is never kept
            kept = accept_noise[:, depth, trial].unsqueeze(-1) * q.gather(-1, x) < p.gather(-1, x)
            kept = open_ & kept.squeeze(-1)  # [B]
            child = torch.where(kept, node, child)
            residual = (p - q).clamp_min_(0)  # [B, V]
            # p = q up to rounding leaves nothing; then p itself is as good a residual
            smaller = (open_ & ~kept).unsqueeze(-1) & (residual.amax(-1, keepdim=True) > 0)
            p = torch.where(smaller, residual, p)
            q = q.scatter(-1, x, 0.0)
        ended = child == 0
        paths[:, depth] = child
        at = torch.where(ended, at, child)
        p = torch.where(ended.unsqueeze(-1), p, target_probs[starts + at].double())
    return TreeOutcome(paths, (paths > 0).sum(-1), sample_from_probs(p, recover_noise))


def _starts(proposal: TreeProposal, num_rows: int) -> Tensor:  # -> [B], the row of each root
    ends = (proposal.lengths + 1).cumsum(0)  # [B]
    num_nodes = int(ends[-1]) if len(ends) else 0
    if num_rows != num_nodes:
        raise ValueError(f"the target has {num_rows} rows for {num_nodes} nodes, roots included")
    return ends - (proposal.lengths + 1)


def _children(proposal: TreeProposal, at: Tensor) -> Tensor:  # [B] -> [B, T + 1] bool
    return proposal.drafted & (proposal.parents == at.unsqueeze(-1))


def _normalised(weights: Tensor) -> Tensor:  # [B, V] float64 -> [B, V], of sum 1; zeros stay zeros
    largest = weights.amax(-1, keepdim=True)  # [B, 1]
    # a sum of whole numbers is exact in any order, so it does not depend on the batch
    odds = whole(weights / largest.clamp_min(TINY)).sum(-1, keepdim=True)  # [B, 1]
    return weights / (largest * (odds.double() / UNIT)).clamp_min(TINY)


def _check_tree(request: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
    if len(tokens) != len(parents):
        raise ValueError(f"request {request} has {len(tokens)} tokens and {len(parents)} parents")
    siblings: dict[tuple[int, int], int] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        where = f"request {request}, node {node}"
        if token < 0:
            raise ValueError(f"{where}: token {token} is negative")
        if not 0 <= parent < node:
            raise ValueError(f"{where}: parent {parent} does not come before it, see 0..{node - 1}")
        twin = siblings.setdefault((parent, token), node)
        if twin != node:
            raise ValueError(f"{where}: token {token} is also that of its sibling, node {twin}")


def _check_probs(probs: Tensor, num_requests: int, num_nodes: int, largest: int) -> None:
    if probs.ndim != 3 or probs.shape[:2] != (num_requests, num_nodes):
        raise ValueError(f"probs is {tuple(probs.shape)}, must be ({num_requests}, {num_nodes}, V)")
    if largest >= probs.shape[2]:
        raise ValueError(f"token {largest} is outside the vocabulary of {probs.shape[2]} in probs")
