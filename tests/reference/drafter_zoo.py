"""Every registered drafter, ready to be let loose on a tiny model, and a bench that watches it.

Whoever registers a drafter adds it to `ZOO`: the conformance tests refuse a name without an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from reference.tiny_engine import Bench
from reference.tiny_heads import (
    eagle1_original,
    eagle_config,
    make_head,
    medusa_config,
    medusa_original,
)
from safetensors.torch import load_file
from torch import Tensor

from forerun.config import SpeculationConfig
from forerun.draft.base import Drafter, make_drafter
from forerun.engine.core import EngineCore
from forerun.heads.config import HeadConfig, expected_shapes
from forerun.model.loader import open_model
from forerun.types import DraftRequest, Features, Proposal, RequestOutcome


def _no_options(target: Path) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Species:
    """One way to set a drafter up, and what may be expected of it."""

    drafter: str  # its registered name
    # How many requests it still keeps state of; what it learned of requests that ended is not that.
    held: Callable[[Drafter], int]
    options: Callable[[Path], dict[str, Any]] = _no_options  # by the target's folder
    prepare: Callable[[Any], None] | None = None  # what is done to it once it is made
    drafts: bool = True  # proposes something, some of it right, where text repeats itself
    copies: bool = True  # proposes only tokens that the request, or its tenant's past, holds
    alone: bool = True  # proposes the same whoever is beside it
    deterministic: bool = True  # never samples its drafts


def _nothing(drafter: Drafter) -> int:
    return 0


def _indexes(drafter: Any) -> int:
    return len(drafter._indexes)


def _requests(drafter: Any) -> int:
    return len(drafter._requests)


def _followers(drafter: Any) -> int:
    drafter.cache.check_integrity()
    return len(drafter._followers) + drafter.cache.num_blocks - drafter.cache.num_free


def _num_requests(drafter: Any) -> int:
    return drafter.num_requests


def _with_store(target: Path) -> dict[str, Any]:
    return {"suffix_store_tokens": 4096, "suffix_store_shared": True}


def _with_itself(target: Path) -> dict[str, Any]:
    """The target as its own draft model."""
    return {"model": str(target)}


def _sampling_itself(target: Path) -> dict[str, Any]:
    return {"model": str(target), "draft_sampling": "sampled"}


def _for_nothing(drafter: Any) -> None:
    """Have a pass cost what a far smaller model's would: drafts are as long as they may be."""
    drafter._cost = 0.0


def _with_eagle(target: Path) -> dict[str, Any]:
    """An EAGLE-1 head that hands the newest token's embedding on, so that habits are known."""
    folder = target.parent / "eagle"
    if not folder.exists():
        config = eagle_config(open_model(target).config, 1)
        weights = _zeros(config)
        size = config.layer.hidden_size
        weights["fc.weight"][:, :size] = 3 * torch.eye(size)
        weights["layer.mlp_norm.weight"] += 1
        eagle1_original(folder, replace(make_head(config), weights=weights))
    return {"model": str(folder)}


def _with_medusa(target: Path) -> dict[str, Any]:
    """Medusa heads that know by habit what follows the token whose state they read."""
    folder = target.parent / "medusa"
    if not folder.exists():
        config = medusa_config(open_model(target).config, num_heads=4)
        weights = _zeros(config)
        embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        follows = _successors(torch.arange(config.vocab_size))
        for index in range(config.num_heads):
            follows = _successors(follows)
            weights[f"heads.{index}.out.weight"].index_add_(0, follows, 0.3 * embedding)
        medusa_original(folder, replace(make_head(config), weights=weights))
    return {"model": str(folder)}


def _zeros(config: HeadConfig) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in expected_shapes(config).items()}


def _successors(ids: Tensor) -> Tensor:
    """What a token calls for in a tiny model: see `save_tiny_model`."""
    return torch.where((ids + 1) % 7 == 0, ids - 6, (ids + 1).clamp_max(len(ids) - 1))


ZOO: Mapping[str, Species] = {
    "none": Species("none", _nothing, drafts=False),
    "ngram": Species("ngram", _indexes),
    "suffix": Species("suffix", _requests),
    "suffix with a store": Species("suffix", _requests, _with_store),
    "auto": Species("auto", _num_requests, alone=False),
    "auto with a head": Species("auto", _num_requests, _with_eagle, copies=False, alone=False),
    "auto with a draft model": Species(
        "auto", _num_requests, _with_itself, copies=False, alone=False
    ),
    "auto with a sampling one": Species(
        "auto", _num_requests, _sampling_itself, copies=False, alone=False, deterministic=False
    ),
    # Drafters that run a network, with what they need on disk.
    "draft-model": Species("draft-model", _followers, _with_itself, _for_nothing, copies=False),
    "draft-model, sampled": Species(
        "draft-model",
        _followers,
        _sampling_itself,
        _for_nothing,
        copies=False,
        deterministic=False,
    ),
    "eagle": Species("eagle", _num_requests, _with_eagle, copies=False),
    "medusa": Species("medusa", _num_requests, _with_medusa, copies=False),
}


class Watched:
    """A drafter, and what it was told and proposed; what it does wrong is written down."""

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self.inner, self._vocab_size = inner, vocab_size
        self.abilities = inner.abilities
        self.started: list[int] = []
        self.finished: list[int] = []
        # By request: how many tokens it had, how many more were allowed, and the draft.
        self.drafts: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
        self.tokens: dict[int, list[int]] = {}  # of each request, as last seen
        self.complaints: list[str] = []

    def start(self, request: DraftRequest) -> None:
        self.started.append(request.request_id)
        self.inner.start(request)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        proposal = self.inner.propose(requests)
        self._check(requests, proposal)
        for request, row, length in zip(
            requests, proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True
        ):
            key = request.request_id
            self.tokens[key] = list(request.tokens)
            draft = (len(request.tokens), request.max_draft, tuple(row[:length]))
            self.drafts.setdefault(key, []).append(draft)
        return proposal

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        self.inner.observe(outcomes, features)

    def finish(self, request_id: int) -> None:
        self.finished.append(request_id)
        self.inner.finish(request_id)

    def _check(self, requests: Sequence[DraftRequest], proposal: Proposal) -> None:
        def expect(holds: bool, complaint: str) -> None:
            if not holds:
                self.complaints.append(f"{complaint}: {proposal}")

        tokens, lengths, probs = proposal.tokens, proposal.lengths, proposal.probs
        expect(tokens.dim() == 2 and len(tokens) == len(lengths) == len(requests), "rows")
        expect(probs is None or probs.shape == (*tokens.shape, self._vocab_size), "probs")
        expect(probs is None or self.abilities.gives_probs, "probs without the ability")
        expect(proposal.parents is None or self.abilities.gives_trees, "trees without the ability")
        for request, row, length in zip(requests, tokens.tolist(), lengths.tolist(), strict=True):
            expect(0 <= length <= request.max_draft, "length")
            expect(all(0 <= token < self._vocab_size for token in row[:length]), "token")
        if proposal.parents is not None:
            rows = zip(tokens.tolist(), proposal.parents.tolist(), lengths.tolist(), strict=True)
            for row, parents, length in rows:
                nodes = list(zip(parents, row, strict=True))[:length]
                expect(all(0 <= parent < node for node, (parent, _) in enumerate(nodes, 1)), "tree")
                expect(len(set(nodes)) == length, "siblings")


class ZooBench(Bench):
    """A bench with a drafter of the zoo, made as the engine makes it, and watched."""

    def __init__(
        self,
        folder: Path,
        species: Species,
        *,
        max_draft: int = 7,
        wrap: Callable[[Drafter], Drafter] | None = None,  # put around it
        **options: object,
    ) -> None:
        super().__init__(folder, max_draft=max_draft, **options)
        config = SpeculationConfig(
            drafter=species.drafter, max_draft=max_draft, **species.options(folder)
        )
        self.species = species
        self.drafter = make_drafter(config, self.machinery.setting)
        if species.prepare is not None:
            species.prepare(self.drafter)
        self.watched = Watched(self.drafter, self.files.config.vocab_size)
        outer = self.watched if wrap is None else wrap(self.watched)
        self.core = EngineCore(self.machinery.runner, self.machinery.scheduler, outer)

    def run(self, limit: int = 5000):
        """Step until nothing is left to do; the drafter may then hold nothing either."""
        seen = super().run(limit)
        assert self.species.held(self.drafter) == 0, "a request's state outlived it"
        assert not self.watched.complaints, self.watched.complaints[0]
        assert sorted(self.watched.finished) == [each.request.request_id for each in seen]
        return seen

    @property
    def num_drafted(self) -> int:
        return sum(each.stats.num_drafted for each in self.seen)

    @property
    def num_accepted(self) -> int:
        return sum(each.stats.num_accepted for each in self.seen)
