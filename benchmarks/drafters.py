"""What each drafter is worth, by kind of prompt: tokens/s, acceptance by position, cost of a draft.

One engine answers every prompt with every drafter in turn, `none` among them, again and again in
another order: nothing differs but who guesses, and a machine that drifts drifts for all. Sampled
runs have a seed, so deterministic drafters give the same text, which is checked.

    speed     decode tokens per second against plain decoding's, of the same prompts' totals
    tok/pass  mean acceptance length: tokens per pass, the target's own included
    c         seconds that drafting takes in a step, in plain passes
    by depth  of the drafts that were right so far, how many were right at the next position

    python benchmarks/drafters.py --prompts FILE.jsonl --limit 3 --drafters ngram,suffix,auto
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forerun.config import SpeculationConfig
from forerun.draft.base import Abilities, Drafter, NoDrafter, make_drafter
from forerun.engine.engine import Engine
from forerun.engine.results import GenerationResult
from forerun.measure.prompts import DEMO_PROMPTS, DemoPrompt, read_prompts
from forerun.measure.provenance import provenance
from forerun.params import SamplingParams
from forerun.types import DraftRequest, Features, Proposal, RequestOutcome

PLAIN = "none"


class Exchangeable:
    """Passes everything on to the drafter whose turn it is."""

    def __init__(self) -> None:
        self.current: Drafter = NoDrafter()

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


@dataclass
class Sums:
    """What the runs of one drafter on one group add up to."""

    seconds: list[float] = field(default_factory=list)  # of each round
    num_emitted: int = 0
    num_steps: int = 0
    draft_s: float = 0.0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, result: GenerationResult, round_number: int) -> None:
        stats = result.stats
        while len(self.seconds) <= round_number:
            self.seconds.append(0.0)
        self.seconds[round_number] += stats.e2e_s - stats.ttft_s
        self.num_emitted += stats.num_emitted
        self.num_steps += stats.num_steps
        self.draft_s += stats.draft_s
        for total, counts in (
            (self.offered, stats.offered_by_position),
            (self.accepted, stats.accepted_by_position),
        ):
            total.extend([0] * (len(counts) - len(total)))
            for index, count in enumerate(counts):
                total[index] += count

    def by_depth(self) -> list[float]:
        """Accepted / reached at each position: a draft that ended before it did not reach it."""
        reached = [
            self.offered[:1],
            *([a, o] for a, o in zip(self.accepted, self.offered[1:], strict=False)),
        ]
        return [
            accepted / max(1, min(each))
            for accepted, each in zip(self.accepted, reached, strict=False)
            if each
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, help="JSON lines; default: the package's own")
    parser.add_argument("--limit", type=int, help="prompts of each group")
    parser.add_argument("--drafters", default="ngram,suffix,auto")
    parser.add_argument("--draft-model", help="for draft-model, eagle, medusa; auto has it too")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts, args.limit) if args.prompts else list(DEMO_PROMPTS)
    switch = Exchangeable()
    engine = Engine.from_pretrained(args.model, drafter=switch, enable_prefix_caching=False)
    with engine:
        drafters = {PLAIN: NoDrafter(), **make_all(args, engine)}
        tables = {
            temperature: run(engine, switch, drafters, prompts, temperature, args)
            for temperature in map(float, args.temperatures.split(","))
        }
        machinery = engine.machinery
        for temperature, table in tables.items():
            show(temperature, table)
        facts = {
            "model": args.model,
            "kernels": machinery.kernels,
            "dtype": str(machinery.dtype),
            "row_cost": machinery.runner.row_cost,
            "pass_ms": 1e3 * machinery.runner.pass_s,
            "prompts": len(prompts),
        }
    rows = {str(temperature): describe(table) for temperature, table in tables.items()}
    print(json.dumps({"benchmark": "drafters", **facts, "rows": rows, **provenance()}))


def make_all(args: argparse.Namespace, engine: Engine) -> dict[str, Drafter]:
    """Make the drafters that are compared, all beside one loaded target."""
    made = {}
    for name in args.drafters.split(","):
        takes_model = name in ("auto", "draft-model", "eagle", "medusa")
        config = SpeculationConfig(
            drafter=name,
            max_draft=args.draft_tokens,
            model=args.draft_model if takes_model else None,
        )
        made[name] = make_drafter(config, engine.machinery.setting)
    return made


Table = dict[str, dict[str, Sums]]  # by group, by drafter


def run(
    engine: Engine,
    switch: Exchangeable,
    drafters: dict[str, Drafter],
    prompts: Sequence[DemoPrompt],
    temperature: float,
    args: argparse.Namespace,
) -> Table:
    """Answer every prompt with every drafter, in an order that turns."""
    params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=1)
    names = list(drafters)
    for name in names:  # to warm up, and to teach those that learn what a pass costs
        switch.current = drafters[name]
        engine.generate([list(prompts[0].messages)], replace(params, max_tokens=24))
    table: Table = {}
    turn = 0
    for round_number in range(args.rounds):
        for prompt in prompts:
            texts = {}
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                switch.current = drafters[name]
                (result,) = engine.generate([list(prompt.messages)], params)
                texts[name] = result.token_ids
                group = table.setdefault(prompt.title, {each: Sums() for each in names})
                group[name].add(result, round_number)
            turn += 1
            for name in names:
                sampled = switch_samples(drafters[name])
                if not sampled and texts[name] != texts[PLAIN]:
                    print(f"{prompt.title}: {name} changed the text", file=sys.stderr)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return table


def switch_samples(drafter: Drafter) -> bool:
    return drafter.abilities.gives_probs


def total(table: Table) -> dict[str, Sums]:
    """Add all groups up."""
    result: dict[str, Sums] = {}
    for group in table.values():
        for name, sums in group.items():
            into = result.setdefault(name, Sums())
            into.seconds = [
                a + b
                for a, b in zip(
                    into.seconds or [0.0] * len(sums.seconds), sums.seconds, strict=True
                )
            ]
            into.num_emitted += sums.num_emitted
            into.num_steps += sums.num_steps
            into.draft_s += sums.draft_s
            for mine, own in ((into.offered, sums.offered), (into.accepted, sums.accepted)):
                mine.extend([0] * (len(own) - len(mine)))
                for index, count in enumerate(own):
                    mine[index] += count
    return result


def rate(sums: Sums, plain: Sums) -> list[float]:
    """The speed of each round against plain decoding's in the same round."""
    return [b / a for a, b in zip(sums.seconds, plain.seconds, strict=True)]


def cost(sums: Sums, plain: Sums) -> float:
    return (sums.draft_s / sums.num_steps) / (sum(plain.seconds) / plain.num_steps)


def show(temperature: float, table: Table) -> None:
    print(f"\ntemperature {temperature:g}")
    print(f"{'':22}{'':12}{'speed':>8}{'tokens/s':>10}{'tok/pass':>10}{'c':>8}  by depth")
    for title, group in [*table.items(), ("all", total(table))]:
        for name, sums in group.items():
            plain = group[PLAIN]
            depth = " ".join(f"{each:.2f}" for each in sums.by_depth()[:5])
            print(
                f"{title[:21]:22}{name:12}{statistics.median(rate(sums, plain)):7.3f}x"
                f"{sums.num_emitted / sum(sums.seconds):10.1f}"
                f"{sums.num_emitted / sums.num_steps:10.3f}{cost(sums, plain):8.3f}  {depth}"
            )


def describe(table: Table) -> dict[str, Any]:
    return {
        title: {
            name: {
                "speed_by_round": rate(sums, group[PLAIN]),
                "tokens_per_s": sums.num_emitted / sum(sums.seconds),
                "tokens_per_pass": sums.num_emitted / sums.num_steps,
                "draft_cost": cost(sums, group[PLAIN]),
                "by_depth": sums.by_depth(),
            }
            for name, sums in group.items()
        }
        for title, group in [*table.items(), ("all", total(table))]
    }


if __name__ == "__main__":
    main()
