"""How far to draft, and whose guess, by playing real answers back: no quiet machine is needed.

The model answers the prompts once (`--texts FILE` keeps the answers, or takes them from there);
then each rule and each look-up drafter guesses along those texts as in the engine, and a step is
charged what a pass costs (`--row-cost` for each further row, from benchmarks/passes.py). Printed:
tokens per plain pass, so 1.0 is plain decoding, for

    rules      how far the n-gram drafter follows a match, by the shortest and longest suffix
    drafters   the package's look-up drafters and the router over them, by group of prompts

    python benchmarks/draft_length.py [--prompts FILE --limit 8] [--row-cost 0.02 0.06 0.14]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from forerun.config import MAX_DRAFT
from forerun.draft.base import Drafter
from forerun.draft.candid import Guess as DraftTree
from forerun.draft.ngram import NgramDrafter, NgramIndex, continuation, matched_length
from forerun.draft.route import RoutingDrafter
from forerun.draft.suffix import SuffixDrafter
from forerun.engine.engine import Engine
from forerun.measure.prompts import DEMO_PROMPTS, read_prompts
from forerun.measure.provenance import provenance
from forerun.params import SamplingParams
from forerun.types import DraftRequest, RequestOutcome

RULES: dict[str, Callable[[int], int]] = {
    "always": lambda matched: MAX_DRAFT,
    "matched": lambda matched: matched,
    "n - 1": lambda matched: matched - 1,
    "2 (n - 1)": lambda matched: 2 * (matched - 1),
    "2 n + 1": lambda matched: 2 * matched + 1,
    "3 n": lambda matched: 3 * matched,
    "6 n": lambda matched: 6 * matched,
}
SUFFIXES = [(2, 4), (3, 5), (1, 4), (1, 8)]
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(1, 4),
    "suffix": SuffixDrafter,
    "auto": lambda: RoutingDrafter({"ngram": NgramDrafter(1, 4), "suffix": SuffixDrafter()}),
}


@dataclass(frozen=True)
class Text:
    """A prompt and its answer, in tokens."""

    group: str
    prompt: list[int]
    answer: list[int]


@dataclass
class Sum:
    """What texts took."""

    num_tokens: int = 0
    num_passes: int = 0
    cost: float = 0.0  # in passes over one row

    def add(self, num_tokens: int, rows: Iterable[int], row_cost: float) -> None:
        for count in rows:
            self.num_passes += 1
            self.cost += 1 + row_cost * (count - 1)
        self.num_tokens += num_tokens

    @property
    def gain(self) -> float:
        return self.num_tokens / self.cost


@dataclass
class Result:
    """One drafter at one row cost."""

    groups: dict[str, Sum] = field(default_factory=dict)

    @property
    def total(self) -> Sum:
        parts = self.groups.values()
        return Sum(*(sum(getattr(part, name) for part in parts) for name in asdict(Sum())))

    def to_dict(self) -> dict[str, Any]:
        every = {**self.groups, "all": self.total}
        return {
            name: {"gain": own.gain, "tokens_per_pass": own.num_tokens / own.num_passes}
            for name, own in every.items()
        }


Guess = Callable[[Sequence[int], int], list[int]]  # from the tokens so far and the most to draft


def play_rule(text: Text, guess: Guess, max_draft: int) -> list[int]:
    """Draft along a known answer as the engine would: the rows of each pass."""
    tokens, answer, rows, place = list(text.prompt), text.answer, [], 0
    while place < len(answer):
        draft = guess(tokens, min(max_draft, len(answer) - place - 1))
        pairs = zip(draft, answer[place:], strict=False)
        accepted = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        tokens.extend(answer[place : place + accepted + 1])
        place += accepted + 1
        rows.append(1 + len(draft))
    return rows


def play_drafter(
    text: Text, drafter: Drafter, request_id: int, max_draft: int, row_cost: float
) -> list[int]:
    """The same with a drafter, which hears what became of its guesses, and may draft trees."""
    tokens, answer, rows, place = list(text.prompt), text.answer, [], 0

    def view(most: int) -> DraftRequest:
        return DraftRequest(request_id, tokens, most, row_cost, takes_trees=True)

    drafter.start(view(0))
    while place < len(answer):
        proposal = drafter.propose([view(min(max_draft, len(answer) - place - 1))])
        length = int(proposal.lengths[0])
        parents = None if proposal.parents is None else proposal.parents[0, :length].tolist()
        draft = DraftTree(proposal.tokens[0, :length].tolist(), parents)
        kept = draft.count_held(answer[place:])
        emitted = tuple(answer[place : place + kept + 1])
        tokens.extend(emitted)
        place += len(emitted)
        rows.append(1 + length)
        finished = place == len(answer)
        drafter.observe([RequestOutcome(request_id, length, kept, emitted, finished)], None)
    drafter.finish(request_id)
    return rows


def by_rule(suffixes: tuple[int, int], rule: Callable[[int], int], max_draft: int) -> Guess:
    """Follow the latest match as far as the rule says."""
    index = NgramIndex(*suffixes)

    def guess(tokens: Sequence[int], most: int) -> list[int]:
        index.extend(tokens)
        found = index.find(tokens)
        if found is None or most == 0:
            return []
        matched = matched_length(tokens, found, max_draft)
        return continuation(tokens, found, min(rule(matched), most))

    return guess


def rule_table(texts: Sequence[Text], row_cost: float, max_draft: int) -> dict[str, Any]:
    table = {}
    print(f"\na further row costs {row_cost}\n{'suffix':<10}", end="")
    print("".join(f"{name:>10}" for name in RULES))
    for suffixes in SUFFIXES:
        gains = {}
        for name, rule in RULES.items():
            total = Sum()
            for text in texts:
                rows = play_rule(text, by_rule(suffixes, rule, max_draft), max_draft)
                total.add(len(text.answer), rows, row_cost)
            gains[name] = total.gain
        table[f"{suffixes[0]} to {suffixes[1]}"] = gains
        print(f"{suffixes!s:<10}" + "".join(f"{gain:>10.2f}" for gain in gains.values()))
    return table


def drafter_table(texts: Sequence[Text], row_cost: float, max_draft: int) -> dict[str, Any]:
    results = {}
    for name, make in DRAFTERS.items():
        drafter, result = make(), Result()
        for number, text in enumerate(texts):
            rows = play_drafter(text, drafter, number, max_draft, row_cost)
            result.groups.setdefault(text.group, Sum()).add(len(text.answer), rows, row_cost)
        results[name] = result
    print(f"\n{'group':<20}" + "".join(f"{name:>9}" for name in results) + "   auto / best")
    rows = {group: [each.groups[group] for each in results.values()] for group in result.groups}
    for group, sums in {**rows, "all": [each.total for each in results.values()]}.items():
        gains = [each.gain for each in sums]
        ratio = gains[-1] / max(*gains[:-1], 1.0)
        print(f"{group:<20}" + "".join(f"{gain:>9.3f}" for gain in gains) + f"{ratio:>13.3f}")
    return {name: result.to_dict() for name, result in results.items()}


def answer(args: argparse.Namespace) -> list[Text]:
    """Have the model answer the prompts."""
    prompts = read_prompts(Path(args.prompts), args.limit) if args.prompts else list(DEMO_PROMPTS)
    with Engine.from_pretrained(args.model, drafter="none") as engine:
        results = engine.generate(
            [list(prompt.messages) for prompt in prompts],
            SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=1),
        )
    return [
        Text(prompt.title, list(each.prompt_token_ids), list(each.token_ids))
        for prompt, each in zip(prompts, results, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", help="JSON lines to take prompts from")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each category")
    parser.add_argument("--texts", help="JSON lines: answers to keep, or, if it exists, to play")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--max-draft", type=int, default=15)
    parser.add_argument("--row-cost", type=float, nargs="+", default=[0.021])
    parser.add_argument("--only", choices=["rules", "drafters"])
    args = parser.parse_args()
    kept = Path(args.texts) if args.texts else None
    if kept is not None and kept.exists():
        texts = [Text(**json.loads(line)) for line in kept.read_text().splitlines()]
    else:
        texts = answer(args)
        if kept is not None:
            kept.write_text("".join(json.dumps(asdict(text)) + "\n" for text in texts))
    tables: dict[str, Any] = {}
    for row_cost in args.row_cost:
        own = tables[str(row_cost)] = {}
        if args.only != "drafters":
            own["rules"] = rule_table(texts, row_cost, args.max_draft)
        if args.only != "rules":
            own["drafters"] = drafter_table(texts, row_cost, args.max_draft)
    described = {
        "benchmark": "draft_length",
        "num_texts": len(texts),
        "temperature": args.temperature,
        "by_row_cost": tables,
    }
    print(json.dumps(described | provenance()))


if __name__ == "__main__":
    main()
