"""A certificate from beginning to end: which checks, how many, in which order."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...config import SpeculationConfig
from ...engine.engine import Prompt
from ...params import SamplingParams
from ...sampling import RULES, Rule
from ..provenance import provenance
from .bench import CertifyBench
from .certificate import Certificate, ControlCheck, DistributionCheck, RuleControl
from .drafter import PerturbedTarget
from .enumeration import check_rule, check_wrong_rules
from .equality import EqualityCheck, check_equality
from .live import Mix, Paths, enumerate_paths, sample_paths
from .prompts import LOOP_TEXT
from .statistics import detectable_shift, family_threshold
from .wrong import WRONG_RULES

__all__ = ["PLANS", "Plan", "Watcher", "certify"]

FAMILY_ERROR_RATE = 1e-3  # chance that a right engine fails anywhere
POWER = 0.99
LENGTH = 3  # tokens of a continuation: with two drafts, so that all rules differ
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 1000}
LIVE_BATCH = 128
SAMPLING_DRAFTER = "perturbed target"
MIXES = (
    Mix("temperature 0.8, top-k 12", {"temperature": 0.8, "top_k": 12}),
    Mix(
        "temperature 1.3, top-k 20, top-p 0.9, min-p 0.02",
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to check."""

    name: str
    num_prompts: int
    num_tokens: int
    reference_batch: int  # of the plain decoding that everything is compared with
    greedy_ways: tuple[tuple[int, int], ...]  # (draft length, batch)
    seeded_ways: tuple[tuple[int, int], ...]
    num_samples: int  # with drafts, for each mix
    num_plain_samples: int
    num_rule_samples: int  # token and block, with sampled drafts
    num_control_samples: int  # each wrong rule
    enumeration: str  # quick or full


ALL_WAYS = ((0, 8), *((length, batch) for length in (1, 3, 7, 15) for batch in (1, 8)))
PLANS: Mapping[str, Plan] = {
    "quick": Plan(
        "quick", 20, 32, 8, ((3, 8), (15, 8)), ((3, 8), (15, 8)), 1000, 500, 500, 800, "quick"
    ),
    "full": Plan("full", 50, 64, 1, ALL_WAYS, ALL_WAYS, 56_000, 8000, 8000, 3000, "full"),
}


class Watcher(Protocol):
    """Whoever shows how far it is."""

    def begin(self, title: str, total: int | None) -> None:
        """A part begins, of so many answers."""

    def advance(self) -> None:
        """An answer came."""


def certify(
    model: str,
    speculation: SpeculationConfig,
    prompts: Sequence[Prompt],
    plan: Plan,
    command: str,
    watcher: Watcher,
    *,
    loop_text: str = LOOP_TEXT,
    **options: Any,
) -> Certificate:
    """Check a model, a drafter and their options. `options` are fields of `EngineConfig`.

    `loop_text` is continued for the distribution tests: what comes next should often, not always,
    be what came before.
    """
    begin_s, where_from = time.perf_counter(), provenance()  # of the code that runs, not of later
    watcher.begin("rules, enumerated", None)
    rules = [check_rule(name, plan.enumeration) for name in RULES]
    rule_controls = [
        RuleControl(name, float(check.largest_error), not check.exact)
        for name, check in check_wrong_rules(plan.enumeration).items()
    ]
    options = {"max_num_seqs": LIVE_BATCH, "max_num_batched_tokens": 1024, **options}
    with CertifyBench(model, speculation, **options) as bench:
        used = prompts[: plan.num_prompts]
        subject = describe(bench, model, speculation) | {"prompts": len(used)}
        ways = plan.greedy_ways
        greedy = list(_equality(bench, "greedy", used, plan, ways, watcher))
        seeded, note = [], _why_not_seeded(bench, speculation)
        if note is None:
            seeded = list(_equality(bench, "seeded", used, plan, plan.seeded_ways, watcher))
        live = _Live(bench, plan, speculation, loop_text, watcher)
        distribution = list(live.checks())
        controls = list(live.controls())
    return Certificate(
        plan=plan.name,
        command=command,
        subject=subject,
        rules=rules,
        rule_controls=rule_controls,
        equality=[*greedy, *seeded],
        seeded_note=note,
        distribution=distribution,
        controls=controls,
        family_error_rate=FAMILY_ERROR_RATE,
        num_tests=live.num_tests,
        seconds=time.perf_counter() - begin_s,
        provenance=where_from,
    )


def describe(bench: CertifyBench, model: str, speculation: SpeculationConfig) -> dict[str, Any]:
    """Say what a certificate speaks of. No path: a folder's name and its weights' hash."""
    machinery = bench.engine.machinery
    return {
        "model": Path(model).name,
        "weights (sha256)": hash_weights(bench.folder),
        "number format": str(machinery.dtype).removeprefix("torch."),
        "quantised to": bench.engine.config.quantize,
        "device": str(machinery.device),
        "kernels": machinery.kernels,
        "threads": machinery.num_threads,
        "exact_bits": f"{'on' if machinery.exact_bits.enabled else 'off'}: "
        f"{machinery.exact_bits.reason}",
        "drafter": _name(bench, speculation),
        "max_draft": speculation.max_draft,
        "accept_rule": speculation.accept_rule,
        "max_model_len": machinery.max_model_len,
    }


def hash_weights(path: Path) -> str:
    """Hash the weight files of a model folder, or a single file, in the order of their names."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _name(bench: CertifyBench, speculation: SpeculationConfig) -> str:
    return "ngram" if speculation.drafter == "auto" else speculation.drafter


def _why_not_seeded(bench: CertifyBench, speculation: SpeculationConfig) -> str | None:
    sampled = bench.gives_probs
    if speculation.accept_rule == "point_mass" or (
        speculation.accept_rule == "auto" and not sampled
    ):
        return None
    return (
        "Seeded equality is not promised, and was not checked: where drafts are sampled, or the "
        "rule is token or block, the same seed gives another sample of the same distribution."
    )


def _equality(
    bench: CertifyBench,
    kind: str,
    prompts: Sequence[Prompt],
    plan: Plan,
    ways: Sequence[tuple[int, int]],
    watcher: Watcher,
) -> Iterator[EqualityCheck]:
    how: dict[str, Any] = {"temperature": 0} if kind == "greedy" else dict(SEEDED)
    params = SamplingParams(max_tokens=plan.num_tokens, **how)
    watcher.begin(f"{kind} equality", len(prompts) * (len(ways) + 1))
    yield from check_equality(
        bench, kind, prompts, params, plan.reference_batch, ways, watcher.advance
    )


class _Live:
    """The distribution tests and controls, which share prompt, exact paths and threshold."""

    def __init__(
        self,
        bench: CertifyBench,
        plan: Plan,
        speculation: SpeculationConfig,
        loop_text: str,
        watcher: Watcher,
    ) -> None:
        self._bench = bench
        self._plan = plan
        self._watcher = watcher
        self._speculation = speculation
        # All but the last token are whole blocks, found in the prefix cache every time.
        size = bench.engine.config.block_size
        self._prompt = bench.engine.encode(loop_text)[-size - 1 :]
        self._vocab_size = bench.engine.model_config.vocab_size
        self._seed = 0
        each = LENGTH + 1  # tests of a sample: every token, and the first two together
        num_runs = 2 * len(MIXES) + 2 + len(WRONG_RULES)
        self.num_tests = each * num_runs
        self.threshold = family_threshold(self.num_tests, FAMILY_ERROR_RATE)
        self._paths: dict[str, Paths] = {}

    def checks(self) -> Iterator[DistributionCheck]:
        """Test the drafter in use, plain decoding, and the rules for sampled drafts."""
        plan, own = self._plan, _name(self._bench, self._speculation)
        for mix in MIXES:
            yield from self._check(mix, "none", "none", None, 0, plan.num_plain_samples)
            rule = self._speculation.accept_rule
            length = self._speculation.max_draft
            yield from self._check(mix, own, rule, None, length, plan.num_samples)
        for rule in ("token", "block"):
            yield from self._check(
                MIXES[0], SAMPLING_DRAFTER, rule, RULES[rule], LENGTH, plan.num_rule_samples
            )

    def controls(self) -> Iterator[ControlCheck]:
        """Put each wrong rule into the engine."""
        for name, (rule, explanation) in WRONG_RULES.items():
            tests = {
                check.where: check.test.p_value
                for check in self._check(
                    MIXES[1], SAMPLING_DRAFTER, name, rule, LENGTH, self._plan.num_control_samples
                )
            }
            where = min(tests, key=lambda key: tests[key])
            yield ControlCheck(
                name=name,
                explanation=explanation,
                where=where,
                p_value=tests[where],
                threshold=self.threshold,
                num_samples=self._plan.num_control_samples,
            )

    def _check(
        self, mix: Mix, drafter: str, name: str, rule: Rule | None, max_draft: int, num_samples: int
    ) -> Iterator[DistributionCheck]:
        if mix.name not in self._paths:
            self._watcher.begin(f"exact distribution, {mix.name}", None)
            self._paths[mix.name] = enumerate_paths(
                self._bench, self._prompt, mix, LENGTH, LIVE_BATCH
            )
        self._watcher.begin(f"continuations, {drafter}, {name}", num_samples)
        sampled_drafter = None
        if rule is not None:
            after = self._paths[mix.name].after()
            sampled_drafter = PerturbedTarget(self._vocab_size, 7, len(self._prompt), after)
        self._bench.use(sampled_drafter, rule)
        sampled = sample_paths(
            self._bench,
            self._prompt,
            mix,
            length=LENGTH,
            num_samples=num_samples,
            first_seed=self._seed,
            max_draft=max_draft,
            batch=LIVE_BATCH,
            advance=self._watcher.advance,
        )
        self._seed += num_samples  # no two runs share noise
        for where, test in sampled.tests(self._paths[mix.name]).items():
            yield DistributionCheck(
                mix=mix.name,
                drafter=drafter,
                rule=name,
                where=where,
                test=test,
                threshold=self.threshold,
                # against exact probabilities: as good as two arms of twice the size
                # (with a single cell nothing can differ, and so no shift is ever seen)
                detectable_shift=(
                    detectable_shift(2 * num_samples, test.df, self.threshold, POWER)
                    if test.df
                    else 1.0
                ),
                num_drafted=sampled.num_drafted,
                num_accepted=sampled.num_accepted,
            )
