"""How far the n-gram drafter should follow a match, by playing real answers back.

The model answers the prompts once; then each rule drafts for those texts, token by token as the
engine would, and a step is charged what a pass costs here (`--row-cost` for each further row, from
benchmarks/passes.py). Printed: tokens per plain pass, so 1.0 is plain decoding; then the same for
the package's look-up drafters as they are, and tokens per pass.

    python benchmarks/draft_length.py [--prompts FILE --limit 8]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from forerun.config import SpeculationConfig
from forerun.draft.base import make_drafter
from forerun.draft.ngram import NgramIndex, continuation, matched_length
from forerun.engine.engine import Engine
from forerun.measure.prompts import DEMO_PROMPTS, read_prompts
from forerun.measure.provenance import provenance
from forerun.params import SamplingParams
from forerun.types import DraftRequest

RULES: dict[str, Callable[[int], int]] = {
    "always": lambda matched: 1 << 20,
    "matched": lambda matched: matched,
    "n - 1": lambda matched: matched - 1,
    "2 (n - 1)": lambda matched: 2 * (matched - 1),
    "2 n + 1": lambda matched: 2 * matched + 1,
    "3 n": lambda matched: 3 * matched,
    "6 n": lambda matched: 6 * matched,
}
SUFFIXES = [(2, 4), (3, 5), (1, 4), (1, 8)]


Guess = Callable[[Sequence[int], int], list[int]]  # from the tokens so far and the most to draft


def play(prompt: Sequence[int], answer: Sequence[int], guess: Guess, max_draft: int) -> list[int]:
    """Draft along a known answer as the engine would: the rows of each pass."""
    tokens, rows, place = list(prompt), [], 0
    while place < len(answer):
        draft = guess(tokens, min(max_draft, len(answer) - place - 1))
        pairs = zip(draft, answer[place:], strict=False)
        accepted = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        tokens.extend(answer[place : place + accepted + 1])
        place += accepted + 1
        rows.append(1 + len(draft))
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


def by_drafter(name: str, row_cost: float) -> Guess:
    """Draft as a drafter of the package does."""
    drafter = make_drafter(SpeculationConfig(drafter=name))
    drafter.start(DraftRequest(0, [], 0, row_cost))

    def guess(tokens: Sequence[int], most: int) -> list[int]:
        proposal = drafter.propose([DraftRequest(0, tokens, most, row_cost)])
        return proposal.tokens[0, : int(proposal.lengths[0])].tolist()

    return guess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", help="JSON lines to take prompts from")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--max-draft", type=int, default=15)
    parser.add_argument("--row-cost", type=float, default=0.021)
    args = parser.parse_args()
    prompts = read_prompts(Path(args.prompts), args.limit) if args.prompts else list(DEMO_PROMPTS)
    with Engine.from_pretrained(args.model) as engine:
        results = engine.generate(
            [list(prompt.messages) for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=args.max_tokens),
        )
    table = {}
    print(f"{'suffix':<10}" + "".join(f"{name:>10}" for name in RULES))
    for suffixes in SUFFIXES:
        gains = {}
        for name, rule in RULES.items():
            cost = 0.0
            for each in results:
                guess = by_rule(suffixes, rule, args.max_draft)
                rows = play(each.prompt_token_ids, each.token_ids, guess, args.max_draft)
                cost += sum(1 + args.row_cost * (count - 1) for count in rows)
            gains[name] = sum(len(each.token_ids) for each in results) / cost
        table[f"{suffixes[0]} to {suffixes[1]}"] = gains
        print(f"{suffixes!s:<10}" + "".join(f"{gain:>10.2f}" for gain in gains.values()))
    drafters = {}
    for name in ("ngram", "suffix"):
        passes, cost = 0, 0.0
        for each in results:
            guess = by_drafter(name, args.row_cost)
            rows = play(each.prompt_token_ids, each.token_ids, guess, args.max_draft)
            passes += len(rows)
            cost += sum(1 + args.row_cost * (count - 1) for count in rows)
        num_tokens = sum(len(each.token_ids) for each in results)
        drafters[name] = {"gain": num_tokens / cost, "tokens_per_pass": num_tokens / passes}
        print(f"{name:<10}{num_tokens / cost:>10.3f}, {num_tokens / passes:.3f} tokens per pass")
    described = {
        "benchmark": "draft_length",
        "num_prompts": len(prompts),
        "table": table,
        "drafters": drafters,
    }
    print(json.dumps(described | {"row_cost": args.row_cost, **provenance()}))


if __name__ == "__main__":
    main()
