"""The acceptance rules by name, each from a step's logits to its outcome; and which one to use.

All of them are lossless. A rule may look at logits, filters, drafts and noise, at nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..types import Outcome, Proposal
from .acceptance import accept_block, accept_samples, accept_tokens
from .filters import FilterParams
from .sampler import sample_tokens
from .target import find_target

__all__ = ["RULES", "Chooser", "Noise", "Rule", "choose_by_drafts", "make_chooser"]


@dataclass(frozen=True, slots=True)
class Noise:
    """A step's uniforms, float64 in [0, 1). What they are keyed by: see `noise`."""

    target: Tensor  # [M] Stream.TARGET, one for each row of logits
    accept: Tensor  # [B, K] Stream.ACCEPT, one for each draft token; padding has some number
    recover: Tensor  # [B] Stream.RECOVER


# (adjusted logits [M, V], filters of the M rows, drafts, noise) -> what becomes of the drafts
Rule = Callable[[Tensor, FilterParams, Proposal, Noise], Outcome]


def point_mass(logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise) -> Outcome:
    """Sample the target in every row; see `accept_samples`."""
    return accept_samples(sample_tokens(logits, params, noise.target), proposal)


def token(logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise) -> Outcome:
    """Token rejection sampling; see `accept_tokens`."""
    target = find_target(logits, params)
    return accept_tokens(target, proposal, noise.accept, noise.recover)


def block(logits: Tensor, params: FilterParams, proposal: Proposal, noise: Noise) -> Outcome:
    """Block verification; see `accept_block`."""
    target = find_target(logits, params)
    return accept_block(target, proposal, noise.accept, noise.recover)


RULES: Mapping[str, Rule] = {"point_mass": point_mass, "token": token, "block": block}


# Says which rule judges the drafts of a step.
Chooser = Callable[[Proposal], Rule]


def make_chooser(name: str) -> Chooser:
    """Turn the rule's name in the config into who chooses: always that rule, or by the drafts."""
    return choose_by_drafts if name == "auto" else lambda proposal: RULES[name]


def choose_by_drafts(proposal: Proposal) -> Rule:
    """Choose the rule that accepts most.

    Deterministic drafts: point mass, which also keeps the seeded tokens. Sampled ones: block
    verification, or where no request drafts two tokens the token rule, which is the same there.
    """
    if proposal.probs is None:
        return point_mass
    return block if proposal.tokens.shape[1] >= 2 else token
