"""The model card beside a head's files: what it was made of, how, and what it reaches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .._version import __version__
from ..device import cpu_name
from ..heads.config import EagleConfig, Head
from .costs import Costs
from .evaluate import Acceptance
from .loop import Trained
from .recipes import Recipe
from .target import Target

__all__ = ["Card", "describe_card", "write_card"]

FILE, FIGURES = "README.md", "training.json"


@dataclass(frozen=True, slots=True)
class Card:
    """What the card tells."""

    target: Target
    head: Head
    recipe: Recipe
    done: Trained
    costs: Costs
    command: str
    num_rows: int
    num_tokens: int  # of their answers
    num_held_out: int  # rows
    coverage: float  # of held-out text, by the draft vocabulary


def write_card(folder: Path, card: Card) -> None:
    """Put the card, and its figures for programs, beside the head's files."""
    (folder / FILE).write_text(describe_card(card), encoding="utf-8")
    told = {
        "recipe": asdict(card.recipe),
        "costs": asdict(card.costs),
        "history": [asdict(each) for each in card.done.history],
        "ended": card.done.ended,
        "training_s": card.done.elapsed_s,
        "num_tokens": card.done.num_tokens,
        "num_rows": card.num_rows,
        "coverage": card.coverage,
        "command": card.command,
        "forerun": __version__,
    }
    (folder / FIGURES).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def describe_card(card: Card) -> str:
    """Write the card as Markdown."""
    config, recipe, done, best = card.head.config, card.recipe, card.done, card.done.best
    if isinstance(config, EagleConfig):
        kind, drafter = f"EAGLE-{config.generation}", "eagle"
    else:
        kind, drafter = f"Medusa ({config.num_heads} heads)", "medusa"
    lines = [
        f"# {kind} draft head for {card.target.name}",
        "",
        f"    forerun serve --model {card.target.name} --drafter {drafter} --draft-model FOLDER",
        "",
        "A draft head guesses tokens ahead; the target checks them, so answers stay its own.",
        "",
        "## Acceptance on held-out rows",
        "",
        f"How often the first drafts of a chain all hold, at {best.acceptance.num_drafts:,} places "
        f"in {card.num_held_out:,} rows that were not learnt from.",
        "",
        *_table(best.acceptance),
        "",
        f"Tokens of a pass, chains of {len(best.acceptance.greedy)}: "
        f"{best.acceptance.greedy_length:.2f} at temperature 0, "
        f"{best.acceptance.sampled_length:.2f} at temperature 1 with sampled drafts.",
        "",
        *_projection(card.costs, best.acceptance),
        "",
        "## How it was made",
        "",
        f"- Data: {card.num_rows:,} prompts with the target's own answers, {card.num_tokens:,} "
        "tokens of answers.",
        f"- Draft vocabulary: {config.draft_vocab_size:,} of {config.vocab_size:,} tokens, which "
        f"hold {card.coverage:.1%} of held-out answers.",
        f"- Learnt from {done.num_tokens:,} tokens ({done.num_tokens / max(card.num_tokens, 1):.1f}"
        f" rounds) in {done.elapsed_s / 60:.0f} minutes; the best of {len(done.history)} "
        f"judgements, after step {best.step:,}; ended: {done.ended}.",
        f"- Recipe: loss {recipe.loss}, {recipe.num_guesses} guesses of each token weighted "
        f"{recipe.decay}^i, feature loss {recipe.feature_weight}, feature noise {recipe.noise}, "
        f"AdamW {recipe.learning_rate} with betas {list(recipe.betas)}, gradients cut at "
        f"{recipe.clip}, {recipe.batch_tokens} tokens a step, seed {recipe.seed}.",
        f"- On: {cpu_name()}, {card.target.num_threads} threads; forerun {__version__}.",
    ]
    if card.command:
        lines += ["", "## Make it again", "", f"    {card.command}"]
    return "\n".join(lines) + "\n"


def _table(acceptance: Acceptance) -> list[str]:
    count = range(1, len(acceptance.greedy) + 1)
    return [
        _line(["drafts", *map(str, count)]),
        _line(["---"] * (len(count) + 1)),
        _line(["temperature 0", *[f"{each:.3f}" for each in acceptance.greedy]]),
        _line(["temperature 1, sampled", *[f"{each:.3f}" for each in acceptance.sampled]]),
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _projection(costs: Costs, acceptance: Acceptance) -> list[str]:
    """Project speed-ups of chains of every length."""
    lengths = [1 + sum(acceptance.greedy[: n + 1]) for n in range(len(acceptance.greedy))]
    speeds = [f"{costs.speedup(length, n):.2f} with {n}" for n, length in enumerate(lengths, 1)]
    return [
        f"A pass of the target took {costs.target_s * 1e3:.1f} ms where this was made, one more "
        f"row {costs.row:.3f} of it, a pass of the head {costs.head:.3f}. Projected speed-up at "
        f"temperature 0, by drafts of a chain: {', '.join(speeds)}."
    ]
