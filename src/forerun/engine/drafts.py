"""A proposal taken apart into one draft per request, checked, and put together again.

Drafts come from drafters, which may be wrong in any way; what leaves here is sound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..types import Proposal

__all__ = ["NO_DRAFT", "Draft", "find_fault", "pack_drafts", "read_drafts"]

SUM_TOLERANCE = 1e-3  # of a row of probabilities from 1; logits taken for them are far off


@dataclass(frozen=True, slots=True)
class Draft:
    """One request's draft as its drafter gave it."""

    tokens: tuple[int, ...]  # with padding, until it is cut
    length: int
    probs: Tensor | None  # [K, V] float32; None: deterministic
    parents: tuple[int, ...] | None = None  # see `Proposal.parents`; None: one path
    method: str | None = None  # who guessed; None: the drafter that was asked

    def cut(self, max_draft: int) -> Draft:
        """Drop the padding, and what is too long: for sampled drafts nothing is."""
        length = min(self.length, max_draft)
        probs = None if self.probs is None else self.probs[:length]
        parents = None if self.parents is None else self.parents[:length]
        return replace(
            self, tokens=self.tokens[:length], length=length, probs=probs, parents=parents
        )

    def first_path(self) -> Draft:
        """Keep of a tree the path that its drafter thought best: first children all the way."""
        if self.parents is None:
            return self
        path: list[int] = []
        for node, parent in enumerate(self.parents, 1):
            if parent == (path[-1] if path else 0):
                path.append(node)
        tokens = tuple(self.tokens[node - 1] for node in path)
        return replace(self, tokens=tokens, length=len(tokens), parents=None)


NO_DRAFT = Draft((), 0, None)


def read_drafts(proposal: Proposal, num_requests: int) -> list[Draft]:
    """Take a proposal apart.

    Raises:
        ValueError: the proposal as a whole does not fit the batch.
    """
    tokens, lengths, probs = proposal.tokens, proposal.lengths, proposal.probs
    if tokens.dtype.is_floating_point or lengths.dtype.is_floating_point:
        raise ValueError(f"a proposal holds whole numbers, not {tokens.dtype}, {lengths.dtype}")
    if tokens.dim() != 2 or len(tokens) != num_requests or lengths.shape != (num_requests,):
        raise ValueError(
            f"a proposal of shapes {list(tokens.shape)}, {list(lengths.shape)} for "
            f"{num_requests} requests"
        )
    if probs is not None and probs.shape[:-1] != tokens.shape:
        raise ValueError(f"probabilities {list(probs.shape)} for tokens {list(tokens.shape)}")
    parents, methods = proposal.parents, proposal.methods
    if parents is not None and parents.shape != tokens.shape:
        raise ValueError(f"parents {list(parents.shape)} for tokens {list(tokens.shape)}")
    if methods is not None and len(methods) != num_requests:
        raise ValueError(f"{len(methods)} methods for {num_requests} requests")
    rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return [
        Draft(
            tuple(row),
            length,
            None if probs is None else _drawn_from(probs[index]),
            None if parents is None else tuple(parents[index].tolist()),
            None if methods is None else methods[index],
        )
        for index, (row, length) in enumerate(rows)
    ]


def find_fault(draft: Draft, max_draft: int, vocab_size: int) -> str | None:
    """Say what is wrong with one request's draft; a deterministic one may be too long."""
    if not 0 <= draft.length <= len(draft.tokens):
        return "bad_length"
    tokens = draft.tokens[: draft.length]
    if any(not 0 <= token < vocab_size for token in tokens):
        return "token_outside_vocabulary"
    if draft.parents is not None and not _is_tree(tokens, draft.parents[: draft.length]):
        return "bad_tree"
    if draft.probs is None:
        return None
    if draft.parents is not None:
        return "sampled_tree"  # siblings would have to be drawn one after the other
    # Whoever samples drafts fills the length that was fixed before the sampling, or samples none. A
    # length chosen afterwards could depend on the sampled tokens, and so move the output
    # (non-anticipation).
    if draft.length != max_draft:
        return "length_chosen_after_sampling"
    if draft.probs.shape[-1] != vocab_size:
        return "bad_probs"
    return None if _are_probs(draft.probs[: draft.length], tokens) else "bad_probs"


def pack_drafts(drafts: Sequence[Draft]) -> Proposal:
    """Put sound drafts together. Where one was sampled, a deterministic one is certain of itself.

    (So a batch in which both kinds meet is still exact.) Rules for sampled drafts know no trees:
    beside them a tree is its first path.
    """
    sampled = [draft.probs for draft in drafts if draft.probs is not None]
    if not any(len(probs) for probs in sampled):
        if all(draft.parents is None for draft in drafts):
            return Proposal.from_lists([draft.tokens for draft in drafts])
        chain = range(max(draft.length for draft in drafts))
        return Proposal.from_trees(
            [
                (draft.tokens, chain[: draft.length] if draft.parents is None else draft.parents)
                for draft in drafts
            ]
        )
    drafts = [draft.first_path() for draft in drafts]
    proposal = Proposal.from_lists([draft.tokens for draft in drafts])
    size = sampled[0].shape[-1]
    probs = torch.zeros((*proposal.tokens.shape, size), device=sampled[0].device)
    for row, draft in zip(probs, drafts, strict=True):
        if draft.probs is not None:
            row[: draft.length] = draft.probs
        elif draft.length:
            ids = torch.tensor(draft.tokens, device=row.device)
            row[torch.arange(draft.length, device=row.device), ids] = 1.0
    return Proposal(proposal.tokens, proposal.lengths, probs)


def _drawn_from(probs: Tensor) -> Tensor | None:  # [K, V]
    """Give a request's distributions; None: rows of zeros draw nothing, so nothing was drawn."""
    return probs.detach().float() if bool(probs[:1].any()) else None


def _is_tree(tokens: Sequence[int], parents: Sequence[int]) -> bool:
    """Check that parents come before children, and that siblings differ."""
    children = set(zip(parents, tokens, strict=True))
    comes_before = all(0 <= parent < node for node, parent in enumerate(parents, 1))
    return comes_before and len(children) == len(tokens)


def _are_probs(probs: Tensor, tokens: Sequence[int]) -> bool:
    """Check that rows are distributions which can draw their tokens."""
    if not tokens:
        return True
    chosen = probs[torch.arange(len(tokens)), list(tokens)]
    sums = probs.sum(-1)
    fits = (sums - 1).abs().amax() <= SUM_TOLERANCE  # False for NaN
    return bool(fits) and bool(probs.amin() >= 0) and bool(chosen.amin() > 0)
