"""One loaded engine whose drafter and rule can be exchanged while nothing runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

from ...config import EngineConfig, SpeculationConfig
from ...draft.base import Abilities, Drafter
from ...engine.engine import Engine, Prompt
from ...engine.results import GenerationResult
from ...model.loader import open_model
from ...params import SamplingParams
from ...registry import resolve_model
from ...sampling import Chooser, Rule, make_chooser
from ...types import DraftRequest, Features, Proposal, RequestOutcome

__all__ = ["Ask", "CertifyBench"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a prompt and how to answer it."""

    prompt: Prompt
    params: SamplingParams


class CertifyBench:
    """Runs batches of requests through the live engine, and nothing beside it."""

    def __init__(self, model: str, speculation: SpeculationConfig, **options: Any) -> None:
        """Load a model; `options` are fields of `EngineConfig`."""
        self._own_rule = make_chooser(speculation.accept_rule)
        self._choose: Chooser = self._own_rule
        self.folder = resolve_model(model)
        config = EngineConfig(speculation=speculation, **options)
        self.engine = Engine(
            open_model(self.folder),
            config,
            choose=lambda proposal: self._choose(proposal),
            wrap=self._wrap,
        )

    def _wrap(self, drafter: Drafter) -> Drafter:
        self._own_drafter = drafter
        self._drafter = _Exchangeable(drafter)  # in use from here on
        return self._drafter

    @property
    def gives_probs(self) -> bool:
        """Whether the drafter to be certified samples its drafts."""
        return self._own_drafter.abilities.gives_probs

    def use(self, drafter: Drafter | None = None, rule: Rule | None = None) -> None:
        """Exchange drafter and rule; None: the ones that are to be certified."""
        self._drafter.current = drafter or self._own_drafter
        self._choose = self._own_rule if rule is None else lambda _: rule

    def run(self, asks: Sequence[Ask], batch: int) -> Iterator[GenerationResult]:
        """Answer requests, `batch` at a time.

        Raises:
            ForerunError: a request failed; a certificate has no room for that.
        """
        rest = iter(asks)
        while part := list(islice(rest, batch)):
            results = self.engine.generate(
                [ask.prompt for ask in part], [ask.params for ask in part]
            )
            for result in results:
                if result.error is not None:
                    raise result.error
                yield result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


class _Exchangeable:
    """Passes everything on to the current drafter."""

    def __init__(self, current: Drafter) -> None:
        self.current = current

    @property
    def abilities(self) -> Abilities:
        return self.current.abilities

    def start(self, request: DraftRequest) -> None:
        self.current.start(request)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        return self.current.propose(requests)

    def observe(self, outcomes: Sequence[RequestOutcome], features: Features | None) -> None:
        self.current.observe(outcomes, features)

    def finish(self, request_id: int) -> None:
        self.current.finish(request_id)
