"""The same tokens with drafts and without, alone and in batches, greedy and seeded.

At temperature 0 for every drafter; with a seed and T > 0 for deterministic drafts under the
point-mass rule, whose every token is the target's own sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...engine.engine import Prompt
from ...engine.results import GenerationResult
from ...params import SamplingParams
from .bench import Ask, CertifyBench

__all__ = ["Divergence", "EqualityCheck", "check_equality"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two answers part. A margin is the gap of the two likeliest tokens' logits there.

    Both margins near 0: a numeric tie, which rounding decides. Else somebody computes something
    else.
    """

    prompt_index: int
    position: int  # of the output, from 0
    plain_token: int
    other_token: int
    plain_margin: float
    other_margin: float


@dataclass(frozen=True, slots=True)
class EqualityCheck:
    """One way to decode a set of prompts, against plain decoding one by one."""

    kind: str  # greedy or seeded
    max_draft: int
    batch: int
    num_prompts: int
    num_equal: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    divergence: Divergence | None  # the first

    @property
    def passed(self) -> bool:
        return self.num_equal == self.num_prompts

    @property
    def is_vacuous(self) -> bool:
        """Whether it could not fail: drafts were to be made, and none were accepted."""
        return self.max_draft > 0 and self.num_accepted == 0


def check_equality(
    bench: CertifyBench,
    kind: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    reference_batch: int,
    ways: Sequence[tuple[int, int]],  # (draft length, batch); length 0 is plain decoding
    advance: Callable[[], None],
) -> Iterator[EqualityCheck]:
    """Decode plainly, then in every way; `advance` is called for each answer."""
    plain = list(_answers(bench, prompts, params, 0, reference_batch, advance))
    for max_draft, batch in ways:
        others = list(_answers(bench, prompts, params, max_draft, batch, advance))
        pairs = list(zip(plain, others, strict=True))
        equal = [a.token_ids == b.token_ids for a, b in pairs]
        yield EqualityCheck(
            kind=kind,
            max_draft=max_draft,
            batch=batch,
            num_prompts=len(prompts),
            num_equal=sum(equal),
            num_tokens=sum(len(b.token_ids) for b in others),
            num_drafted=sum(b.stats.num_drafted for b in others),
            num_accepted=sum(b.stats.num_accepted for b in others),
            divergence=_first_divergence(pairs),
        )


def _answers(
    bench: CertifyBench,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    max_draft: int,
    batch: int,
    advance: Callable[[], None],
) -> Iterator[GenerationResult]:
    bench.use()
    # Each prompt has its own seed, so that no two rows of a batch share noise.
    seeds = [None if params.seed is None else params.seed + index for index in range(len(prompts))]
    asks = [
        Ask(prompt, replace(params, max_draft=max_draft, seed=seed, logprobs=2))
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    for result in bench.run(asks, batch):
        advance()
        yield result


def _first_divergence(
    pairs: Sequence[tuple[GenerationResult, GenerationResult]],
) -> Divergence | None:
    for index, (plain, other) in enumerate(pairs):
        if plain.token_ids != other.token_ids:
            return _diverge(index, plain, other)
    return None


def _diverge(index: int, plain: GenerationResult, other: GenerationResult) -> Divergence:
    pairs = zip(plain.token_ids, other.token_ids, strict=False)
    same = [a == b for a, b in pairs]
    position = same.index(False) if False in same else len(same) - 1
    return Divergence(
        prompt_index=index,
        position=position,
        plain_token=plain.token_ids[position],
        other_token=other.token_ids[position],
        plain_margin=_margin(plain, position),
        other_margin=_margin(other, position),
    )


def _margin(result: GenerationResult, position: int) -> float:
    assert result.logprobs is not None, "asked for"
    (_, first), (_, second) = result.logprobs[position].top
    return first - second
