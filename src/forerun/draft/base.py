"""What a drafter is, how one is found by name, and the drafter that proposes nothing.

A drafter guesses; it decides nothing. Whatever it proposes, the output distribution stays the
target's, so a drafter may be wrong, late or broken, but never dangerous: an error in it ends in
plain decoding for that request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from ..config import SpeculationConfig
from ..errors import ConfigError, nearest_name
from ..registry import resolve_model
from ..types import DraftRequest, Features, FeatureSpec, Proposal, RequestOutcome
from .setting import DraftSetting

__all__ = [
    "Abilities",
    "Drafter",
    "HasParts",
    "NoDrafter",
    "check_drafter",
    "drafter_names",
    "make_drafter",
]


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a drafter needs and gives. Data, so that nobody asks which class it is."""

    method: str = "custom"  # what it is called where guesses are counted
    features: FeatureSpec | None = None  # the target's hidden states that `observe` is to be given
    gives_probs: bool = False  # samples its drafts and returns their probabilities
    gives_trees: bool = False  # proposes several paths for one pass
    cost_class: str = "free"  # "free": host look-ups; "pass": runs a network


class Drafter(Protocol):
    """The life of a request as a drafter sees it: start, then propose and observe, then finish.

    A drafter keeps its own state up to date from `DraftRequest.tokens`: whatever it has not
    seen of them it catches up on before it predicts.
    """

    @property
    def abilities(self) -> Abilities: ...

    def start(self, request: DraftRequest) -> None:
        """Notice a new request. Called once, before anything is proposed for it."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Guess up to `max_draft` next tokens for each request, in order; 0 tokens is fine."""

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        """Hear what became of a step; `features` if asked for, of catching-up requests too."""

    def finish(self, request_id: int) -> None:
        """Drop all state of a request, however it ended."""


@runtime_checkable
class HasParts(Protocol):
    """A drafter over others, of which one may fail a request while the rest go on."""

    def take_faults(self) -> list[tuple[int, str]]:
        """Hand over whom a part has failed, and which part why, since the last call."""
        ...


class NoDrafter:
    """Propose nothing: plain decoding is speculation with empty drafts, not a second path."""

    abilities = Abilities(method="none")

    def start(self, request: DraftRequest) -> None:
        """Keep nothing."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        return Proposal.empty(len(requests))

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        """Learn nothing."""

    def finish(self, request_id: int) -> None:
        """Drop nothing."""


def _none(config: SpeculationConfig, setting: DraftSetting) -> Drafter:
    return NoDrafter()


def _ngram(config: SpeculationConfig, setting: DraftSetting) -> Drafter:
    from .ngram import NgramDrafter  # here: a drafter that is not in use costs nothing

    return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)


def _draft_model(config: SpeculationConfig, setting: DraftSetting) -> Drafter:
    from .model_loading import make_draft_model

    return make_draft_model(config, setting)


def _eagle(config: SpeculationConfig, setting: DraftSetting) -> Drafter:
    from .head_loading import make_eagle

    return make_eagle(config, setting)


def _medusa(config: SpeculationConfig, setting: DraftSetting) -> Drafter:
    from .head_loading import make_medusa

    return make_medusa(config, setting)


def _auto(config: SpeculationConfig, setting: DraftSetting) -> Drafter:
    from .route import make_router

    return make_router(config, setting)


def _suffix(config: SpeculationConfig, setting: DraftSetting) -> Drafter:
    from .suffix import SuffixDrafter
    from .suffix_store import SuffixStore

    store = None
    if config.suffix_store_tokens:
        store = SuffixStore(
            config.suffix_store_tokens,
            config.suffix_store_age_s,
            shared=config.suffix_store_shared,
        )
    return SuffixDrafter(store)


Factory = Callable[[SpeculationConfig, DraftSetting], Drafter]
# Entry points of other packages: the name of a drafter, and a factory like those here.
GROUP = "forerun.drafters"

_FACTORIES: Mapping[str, Factory] = {
    "auto": _auto,
    "draft-model": _draft_model,
    "eagle": _eagle,
    "medusa": _medusa,
    "ngram": _ngram,
    "none": _none,
    "suffix": _suffix,
}


def drafter_names() -> list[str]:
    """List the names that `make_drafter` knows: ours, and those of other installed packages."""
    return sorted({*_FACTORIES, *entry_points(group=GROUP).names})


def check_drafter(config: SpeculationConfig) -> None:
    """Refuse a drafter or a model of its own that does not exist, before anything is loaded.

    Raises:
        ConfigError: with the nearest name.
        ModelNotFound: there is no such draft model or head.
    """
    if config.drafter not in _FACTORIES and config.drafter not in drafter_names():
        raise ConfigError(
            f"unknown drafter {config.drafter!r}; {nearest_name(config.drafter, drafter_names())}"
        )
    if config.model is not None and config.max_draft:
        resolve_model(config.model)


def make_drafter(config: SpeculationConfig, setting: DraftSetting) -> Drafter:
    """Build the drafter that the configuration names; a draft length of 0 means none.

    Raises:
        ConfigError: there is no such drafter, it cannot be imported, or what it needs is not
            configured.
        ModelFileError, UnsupportedModel: its own model or head does not fit the target.
    """
    check_drafter(config)
    if config.max_draft == 0:
        return _none(config, setting)
    factory = _FACTORIES.get(config.drafter) or _load_factory(config.drafter)
    return factory(config, setting)


def _load_factory(name: str) -> Factory:
    """Import a drafter of another package."""
    point = next(iter(entry_points(group=GROUP, name=name)))
    try:
        factory: Factory = point.load()
    except Exception as error:
        raise ConfigError(
            f"drafter {name!r} ({point.value}) cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return factory
