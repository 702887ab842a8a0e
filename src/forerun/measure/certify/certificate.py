"""The certificate: what was checked, what came out, and the verdict that follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .enumeration import RuleCheck
from .equality import EqualityCheck
from .statistics import GTest

__all__ = ["Certificate", "ControlCheck", "DistributionCheck", "RuleControl"]


@dataclass(frozen=True, slots=True)
class DistributionCheck:
    """One G-test of live continuations against the exact distribution."""

    mix: str
    drafter: str
    rule: str  # "none": without drafts
    where: str  # which tokens of the output
    test: GTest
    threshold: float  # on the p-value, for the stated family-wise error rate
    detectable_shift: float  # smallest total-variation shift caught with 99 % probability
    num_drafted: int
    num_accepted: int

    @property
    def passed(self) -> bool:
        return self.test.p_value >= self.threshold


@dataclass(frozen=True, slots=True)
class ControlCheck:
    """A wrong rule in the live engine. It has passed its check when the test caught it."""

    name: str
    explanation: str
    where: str  # the test that saw most
    p_value: float  # the smallest of its tests
    threshold: float
    num_samples: int

    @property
    def caught(self) -> bool:
        return self.p_value < self.threshold


@dataclass(frozen=True, slots=True)
class RuleControl:
    """A wrong rule under exact enumeration."""

    name: str
    largest_error: float
    caught: bool


@dataclass(frozen=True, slots=True)
class Certificate:
    """All checks of one run."""

    plan: str  # quick or full
    command: str
    subject: Mapping[str, Any]  # model, weights, drafter, options: what it speaks of
    rules: Sequence[RuleCheck]
    rule_controls: Sequence[RuleControl]
    equality: Sequence[EqualityCheck]
    seeded_note: str | None  # why seeded equality was not checked, where it was not
    distribution: Sequence[DistributionCheck]
    controls: Sequence[ControlCheck]
    family_error_rate: float
    num_tests: int
    seconds: float
    provenance: Mapping[str, Any]

    @property
    def faults(self) -> list[str]:
        """List everything that did not hold, in words."""
        found = [f"rule {each.rule} is not exact" for each in self.rules if not each.exact]
        found += [
            f"control {each.name} was not caught by enumeration"
            for each in self.rule_controls
            if not each.caught
        ]
        for each in self.equality:
            way = f"{each.kind}, {each.max_draft} drafts, batch {each.batch}"
            if not each.passed:
                found.append(f"{way}: {each.num_prompts - each.num_equal} texts differ")
            if each.is_vacuous:
                found.append(f"{way}: no draft was ever accepted, so nothing was checked")
        found += [
            f"distribution differs: {each.mix}, {each.drafter}, {each.rule}, {each.where} "
            f"(p = {each.test.p_value:.1e})"
            for each in self.distribution
            if not each.passed
        ]
        found += [
            f"distribution, {each.mix}, {each.drafter}, {each.rule}: drafts were accepted never or "
            "always, so little was checked"
            for each in self.distribution
            if each.rule != "none"
            and each.where == "token 1"
            and not 0 < each.num_accepted < each.num_drafted
        ]
        found += [
            f"control {each.name} was not caught" for each in self.controls if not each.caught
        ]
        return found

    @property
    def holds(self) -> bool:
        return not self.faults

    @property
    def detectable_shift(self) -> float:
        """The smallest shift that every single-token test of the drafter in use would catch."""
        shifts = [
            each.detectable_shift
            for each in self.distribution
            if each.drafter == self.subject["drafter"] and each.rule != "none"
            and each.where.startswith("token ")
        ]  # fmt: skip
        return max(shifts)

    def to_dict(self) -> dict[str, Any]:
        """List everything, for JSON."""
        data = asdict(self)
        for part in ("equality", "distribution", "controls"):
            for entry, check in zip(data[part], getattr(self, part), strict=True):
                entry["passed"] = check.caught if part == "controls" else check.passed
        for entry in data["distribution"]:
            if entry["test"]["statistic"] == math.inf:  # JSON has no infinity
                entry["test"]["statistic"] = None
        for entry in data["rules"]:
            entry["largest_error"] = float(entry["largest_error"])
        return data | {
            "holds": self.holds,
            "faults": self.faults,
            "detectable_shift": self.detectable_shift,
        }
