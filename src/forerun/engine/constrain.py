"""Outputs that must look like something: drafts cut to what is legal, and masks for their rows.

A grammar is part of the target's distribution: it is applied at every draft position, before the
acceptance rule sees the logits, so speculation changes nothing here either. What the grammar forces
is drafted for nothing; it is a guess like any other, and verified like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ForerunError
from ..grammar.masks import unpack_masks
from ..grammar.state import GrammarState
from .drafts import NO_DRAFT, Draft
from .request import Request

__all__ = ["Constrained", "constrain", "find_forced", "hide_forbidden", "mask_logits"]


@dataclass(frozen=True, slots=True)
class Constrained:
    """One request's draft as its grammar lets it pass, and what the grammar allows beside it."""

    draft: Draft
    masks: NDArray[np.int32]  # [length + 1, words] bits: row i after i draft tokens


def find_forced(request: Request, max_draft: int) -> tuple[int, ...]:
    """Say which tokens only one text can follow with, as far as a draft may go.

    A grammar that fails here forces nothing, and ends its request with `grammar_error`.
    """
    if request.grammar is None or max_draft == 0:
        return ()
    try:
        return tuple(request.grammar.likely_forced(max_draft))
    except ForerunError as error:
        request.grammar_error = error
        return ()


def constrain(request: Request, draft: Draft, vocab_size: int) -> Constrained:
    """Fit one request's draft to its grammar, and say what may stand where.

    A deterministic draft is cut at its first illegal token. A sampled one stays whole: its length
    must not depend on what was sampled (non-anticipation), and the rule rejects what has no
    probability under the masked target.

    A grammar that fails here allows nothing, and ends its request with `grammar_error`.
    """
    assert request.grammar is not None, "only what is constrained is asked about"
    try:
        if request.grammar_error is not None:
            raise request.grammar_error
        return _constrain(request.grammar, draft)
    except ForerunError as error:
        request.grammar_error = error
        nothing = np.zeros((1, -(-vocab_size // 32)), np.int32)
        return Constrained(NO_DRAFT, nothing)


def _constrain(grammar: GrammarState, draft: Draft) -> Constrained:
    tokens = draft.tokens[: draft.length]
    if draft.probs is not None and draft.length:
        masks = grammar.masks(tokens[: grammar.count_legal(tokens)])
        # Rows behind an illegal token are never reached: it is rejected for sure.
        free = np.full((draft.length + 1 - len(masks), masks.shape[1]), -1, np.int32)
        return Constrained(draft, np.concatenate([masks, free]))
    legal = draft.cut(grammar.count_legal(tokens))
    return Constrained(legal, grammar.masks(legal.tokens))


def hide_forbidden(
    logits: Tensor, masks: Sequence[NDArray[np.int32] | None], counts: Sequence[int]
) -> frozenset[int]:
    """Make what grammars forbid the least likely, in place, for who only looks for the likeliest.

    Logits stay finite, and NaN or infinity among the forbidden stay bad. Returns the rows in which
    nothing is allowed.
    """
    dead = []
    first = 0
    for packed, count in zip(masks, counts, strict=True):
        if packed is not None:
            allowed = unpack_masks(packed, logits.shape[1])  # [count, V]
            dead += (first + np.flatnonzero(~allowed.any(1))).tolist()
            rows = logits[first : first + count]
            # What is bad stays in sight.
            good = np.isfinite(rows.cpu().numpy())
            _fill(rows, ~allowed & good, torch.finfo(rows.dtype).min)
        first += count
    return frozenset(dead)


def _fill(rows: Tensor, where: NDArray[np.bool_], value: float) -> None:
    """Write a value into places of rows [n, V]."""
    if rows.device.type == "cpu":
        # In one thread: small torch calls in two wait for the other one on a busy machine.
        np.copyto(rows.numpy(), value, where=where)
    else:
        rows.masked_fill_(torch.from_numpy(where).to(rows.device), value)


def mask_logits(
    logits: Tensor, masks: Sequence[NDArray[np.int32] | None], counts: Sequence[int]
) -> Tensor | None:
    """Rule out what grammars do, in place, in logits [M, V]; list the rows touched, if any.

    Request i owns `counts[i]` rows, in order; None stands for one without a grammar.
    """
    touched = []
    first = 0
    for packed, count in zip(masks, counts, strict=True):
        if packed is not None:
            allowed = unpack_masks(packed, logits.shape[1])
            _fill(logits[first : first + count], ~allowed, -np.inf)
            touched.append(torch.arange(first, first + count, device=logits.device))
        first += count
    return torch.cat(touched) if touched else None
