"""A certificate as a page for people."""

from __future__ import annotations

from collections.abc import Sequence

from .certificate import Certificate
from .equality import EqualityCheck

__all__ = ["to_markdown"]


def to_markdown(certificate: Certificate) -> str:
    """Write the certificate as Markdown: verdict first, then each part with its figures."""
    c = certificate
    subject = "\n".join(f"| {name} | {value} |" for name, value in c.subject.items())
    parts = [
        f"# Losslessness certificate: {c.subject['model']}, {c.subject['drafter']}",
        _verdict(c),
        f"Made by `{c.command}` in {c.seconds / 60:.1f} minutes, {c.provenance['time']}, forerun "
        f"{c.provenance['forerun']} ({c.provenance['git']}), {c.provenance['processor']}.",
        f"## What it speaks of\n\n| | |\n|---|---|\n{subject}",
        "It holds for this build, model, drafter and these options on this machine. Other batch "
        "shapes, kernels or machines need a certificate of their own.",
        f"## 1. The rules, enumerated exactly\n\n{_rules(c)}",
        f"## 2. The same tokens\n\n{_equality(c)}",
        f"## 3. The same distribution, through the live engine\n\n{_distribution(c)}",
        f"## 4. Negative controls\n\n{_controls(c)}",
    ]
    return "\n\n".join(parts) + "\n"


def _verdict(c: Certificate) -> str:
    if c.holds:
        return (
            f"**Held.** All {len(c.rules)} rules are exact, all {len(c.equality)} comparisons of "
            f"tokens equal, all {len(c.distribution)} distribution tests passed, and all "
            f"{len(c.controls) + len(c.rule_controls)} wrong rules were caught. A shift of "
            f"{c.detectable_shift:.3f} in total variation would have been seen with 99 % "
            "probability."
        )
    return "**Did not hold.**\n\n" + "\n".join(f"- {fault}" for fault in c.faults)


def _rules(c: Certificate) -> str:
    rows = [
        [each.rule, each.num_models, each.num_cells, "yes" if each.exact else "NO"]
        for each in c.rules
    ]
    wrong = [
        [each.name, f"{each.largest_error:.3f}", "yes" if each.caught else "NO"]
        for each in c.rule_controls
    ]
    return (
        "The package's own functions, called in every cell of their noise at small vocabularies; "
        "the joint distribution of the emitted tokens must equal the target's as fractions.\n\n"
        + table(["rule", "random models", "noise cells", "exact"], rows)
        + "\n\nWrong rules under the same enumeration:\n\n"
        + table(["wrong rule", "largest error of a probability", "caught"], wrong)
    )


def _equality(c: Certificate) -> str:
    rows = [
        [
            each.kind,
            each.max_draft or "none",
            each.batch,
            f"{each.num_equal} of {each.num_prompts}",
            each.num_tokens,
            f"{each.num_accepted} of {each.num_drafted}",
        ]
        for each in c.equality
    ]
    text = "Against plain decoding of each prompt alone, token for token.\n\n" + table(
        ["decoding", "draft length", "batch", "equal", "tokens", "drafts accepted"], rows
    )
    first = next((each for each in c.equality if each.divergence is not None), None)
    if first is not None:
        text += f"\n\n{_divergence(first)}"
    return text if c.seeded_note is None else f"{text}\n\n{c.seeded_note}"


def _divergence(check: EqualityCheck) -> str:
    d = check.divergence
    assert d is not None, "the caller looked"
    return (
        f"First divergence ({check.kind}, {check.max_draft} drafts, batch {check.batch}): prompt "
        f"{d.prompt_index}, output token {d.position + 1}: {d.plain_token} plain, {d.other_token} "
        f"otherwise. Gap of the two likeliest logits there: {d.plain_margin:.4f} plain, "
        f"{d.other_margin:.4f} otherwise. Gaps near 0 are numeric ties; others are faults."
    )


def _distribution(c: Certificate) -> str:
    rows = [
        [
            each.mix,
            each.drafter,
            each.rule,
            each.where,
            each.test.num_first,
            each.test.df,
            f"{each.test.p_value:.3g}",
            f"{each.detectable_shift:.3f}",
            "-" if not each.num_drafted else f"{each.num_accepted / each.num_drafted:.0%}",
        ]
        for each in c.distribution
    ]
    return (
        "Seeded continuations of one prompt against the exact distribution that plain decoding "
        f"states; G-tests with pooled small cells. With {c.num_tests} tests and a family-wise "
        f"error rate of {c.family_error_rate:g} (Bonferroni), a p-value under "
        f"{c.family_error_rate / c.num_tests:.1e} fails. The last but one column is the smallest "
        "total-variation shift that the test catches with 99 % probability, whatever its form.\n\n"
        + table(
            ["mix", "drafter", "rule", "where", "samples", "df", "p", "shift seen", "accepted"],
            rows,
        )
    )


def _controls(c: Certificate) -> str:
    rows = [
        [
            each.name,
            each.explanation,
            each.num_samples,
            f"{each.p_value:.1e} ({each.where})",
            "yes" if each.caught else "NO",
        ]
        for each in c.controls
    ]
    return (
        "Deliberately wrong rules in the same engine, which the same tests must catch.\n\n"
        + table(["wrong rule", "what it does", "samples", "smallest p", "caught"], rows)
    )


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Lay out a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
