"""The distribution that the live engine draws from, against the one that plain decoding states.

For a fixed prompt and options that keep few tokens, the plain engine's own log-probabilities give
the exact distribution of the first tokens, by following every path. Then many seeded continuations,
with drafts and without, are counted at each position and tested against it (G-test, small cells
pooled). Comparing with exact probabilities instead of a second sample needs a quarter of the
continuations for the same power.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...params import MAX_LOGPROBS, SamplingParams
from .bench import Ask, CertifyBench
from .statistics import GTest, compare_with_exact

__all__ = ["Mix", "Paths", "Sampled", "enumerate_paths", "sample_paths"]

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mix:
    """Temperature and filters of a test. They keep at most MAX_LOGPROBS tokens."""

    name: str
    options: Mapping[str, Any]

    def params(self, length: int) -> SamplingParams:
        params = SamplingParams(**self.options, max_tokens=length, ignore_eos=True)
        assert 0 < params.top_k <= MAX_LOGPROBS, "every token must be listed"
        return params


@dataclass(frozen=True, slots=True)
class Paths:
    """The exact probabilities of the first tokens after a prompt."""

    probs: Mapping[Path, float]  # of whole paths of one length

    def after(self) -> dict[Path, dict[int, float]]:
        """The next token's distribution after the beginning of every path."""
        length = len(next(iter(self.probs)))
        found: dict[Path, dict[int, float]] = {}
        for count in range(length):
            shorter = self.project(slice(0, count))
            for path, p in self.project(slice(0, count + 1)).items():
                found.setdefault(path[:-1], {})[path[-1]] = p / shorter[path[:-1]]
        return found

    def project(self, part: slice) -> dict[Path, float]:
        """The joint distribution of the tokens at some positions."""
        total: dict[Path, float] = {}
        for path, p in self.probs.items():
            total[path[part]] = total.get(path[part], 0.0) + p
        return total


@dataclass(frozen=True, slots=True)
class Sampled:
    """Continuations that were counted."""

    counts: Counter[Path]
    num_drafted: int
    num_accepted: int

    def tests(self, exact: Paths) -> dict[str, GTest]:
        """Compare the token at each position, and the first two together, with the exact ones."""
        length = len(next(iter(self.counts)))
        parts = {f"token {at + 1}": slice(at, at + 1) for at in range(length)}
        if length > 1:
            parts["tokens 1-2"] = slice(0, 2)
        return {name: self._test(exact.project(part), part) for name, part in parts.items()}

    def _test(self, exact: dict[Path, float], part: slice) -> GTest:
        counts: Counter[Path] = Counter()
        for path, count in self.counts.items():
            counts[path[part]] += count
        return compare_with_exact(counts, exact)


def enumerate_paths(
    bench: CertifyBench, prompt: Sequence[int], mix: Mix, length: int, batch: int
) -> Paths:
    """Follow every path of `length` tokens, by plain decoding's log-probabilities."""
    bench.use()
    params = replace(
        mix.params(1), max_draft=0, logprobs=MAX_LOGPROBS, logprobs_mode="processed", seed=0
    )
    probs: dict[Path, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Path, float] = {}
        asks = [Ask([*prompt, *path], params) for path in probs]
        for (path, p), result in zip(probs.items(), bench.run(asks, batch), strict=True):
            assert result.logprobs is not None, "asked for"
            listed = {token: math.exp(logprob) for token, logprob in result.logprobs[0].top}
            total = sum(listed.values())
            assert abs(total - 1) < 1e-4, "ties at the cut of top-k: not every token is listed"
            longer |= {(*path, token): p * q / total for token, q in listed.items()}
        probs = longer
    return Paths(probs)


def sample_paths(
    bench: CertifyBench,
    prompt: Sequence[int],
    mix: Mix,
    *,
    length: int,
    num_samples: int,
    first_seed: int,
    max_draft: int,
    batch: int,
    advance: Callable[[], None],
) -> Sampled:
    """Draw so many continuations, each with a seed of its own. Drafter and rule are the bench's."""
    params = replace(mix.params(length), max_draft=max_draft)
    asks = [Ask(prompt, replace(params, seed=first_seed + index)) for index in range(num_samples)]
    counts: Counter[Path] = Counter()
    drafted = accepted = 0
    for result in bench.run(asks, batch):
        counts[result.token_ids] += 1
        drafted += result.stats.num_drafted
        accepted += result.stats.num_accepted
        advance()
    return Sampled(counts, drafted, accepted)
