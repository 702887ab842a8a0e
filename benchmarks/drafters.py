"""What each drafter is worth at batch 1, by group of prompts: speed, acceptance, and what it costs.

Every prompt is answered by every drafter in turn, in one process and on one engine whose drafter is
exchanged between requests; who begins changes from round to round. So drift hits all alike.

    tok/s      tokens after the first by the seconds they took; of the rounds' totals the median
    x plain    the same against drafter `none` in the same round: median, least and most
    tok/pass   emitted tokens by passes, the target's own included
    c          seconds of drafting for each pass, by the seconds of a pass without drafts
    a1 a2 ..   of the drafts that held up to position i - 1, how many held at i as well

    python benchmarks/drafters.py [--prompts FILE --limit 4] [--drafters ngram,suffix,auto]
        [--temperatures 0,0.8]

A drafter with a model or head of its own is written name:MODEL (`eagle:heads/mine`), and so is
`auto` with one. Prints a table for each temperature and group, and one JSON object with provenance
as the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.config import SpeculationConfig
from forerun.draft.base import Drafter, NoDrafter, make_drafter
from forerun.engine.results import GenerationResult
from forerun.engine.stats import SampledRow, StepReport
from forerun.measure.certify.bench import Ask, CertifyBench
from forerun.measure.prompts import DEMO_PROMPTS, DemoPrompt, read_prompts
from forerun.measure.provenance import provenance
from forerun.params import SamplingParams

PLAIN = "none"
POSITIONS = 4  # whose acceptance the table shows; the JSON has all
ALL = "all groups"


@dataclass(frozen=True)
class Contestant:
    """A drafter by name, and the model or head that it is to use."""

    name: str
    model: str | None = None

    @staticmethod
    def parse(text: str) -> Contestant:
        name, _, model = text.partition(":")
        return Contestant(name, model or None)

    def __str__(self) -> str:
        return self.name if self.model is None else f"{self.name}:{Path(self.model).name}"

    def config(self, max_draft: int) -> SpeculationConfig:
        return SpeculationConfig(drafter=self.name, model=self.model, max_draft=max_draft)


@dataclass
class Runs:
    """All answers of one drafter to one group's prompts, at one temperature."""

    seconds: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # by round
    num_timed: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # tokens
    rows: list[tuple[int, int]] = field(default_factory=list)  # positions drafted, accepted
    num_emitted: int = 0
    num_steps: int = 0
    draft_s: float = 0.0
    faults: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, round_number: int, result: GenerationResult, rows: Iterable[SampledRow]) -> None:
        stats = result.stats
        self.seconds[round_number] += stats.e2e_s - stats.ttft_s
        self.num_timed[round_number] += stats.num_emitted - 1
        self.rows += [(row.num_positions, row.num_accepted) for row in rows]
        self.num_emitted += stats.num_emitted
        self.num_steps += stats.num_steps
        self.draft_s += stats.draft_s
        for reason, count in stats.drafter_faults.items():
            self.faults[reason] += count

    def rates(self) -> list[float]:
        """Tokens per second, round by round."""
        return [self.num_timed[each] / self.seconds[each] for each in sorted(self.seconds)]

    def acceptance(self) -> list[float]:
        """Of the drafts that held up to a position, the part that held there as well."""
        found = []
        for position in range(1, max((drafted for drafted, _ in self.rows), default=0) + 1):
            tried = [kept for drafted, kept in self.rows if drafted >= position <= kept + 1]
            if not tried:
                break
            found.append(sum(kept >= position for kept in tried) / len(tried))
        return found


def summary(runs: Runs, plain: Runs) -> dict[str, Any]:
    """Say what a drafter was worth beside plain decoding."""
    rates, plain_rates = runs.rates(), plain.rates()
    ratios = [rate / other for rate, other in zip(rates, plain_rates, strict=True)]
    plain_pass_s = 1 / statistics.median(plain_rates)
    return {
        "tokens_per_s": statistics.median(rates),
        "x_plain": statistics.median(ratios),
        "x_plain_spread": [min(ratios), max(ratios)],
        "mean_acceptance_length": runs.num_emitted / runs.num_steps,
        "draft_cost_ratio": runs.draft_s / runs.num_steps / plain_pass_s,
        "num_drafted_per_pass": sum(drafted for drafted, _ in runs.rows) / runs.num_steps,
        "acceptance_by_position": runs.acceptance(),
        "faults": dict(runs.faults),
    }


Table = dict[str, dict[str, Runs]]  # group -> drafter -> what it did


class Race:
    """The engine, the drafters, and who answers next."""

    def __init__(self, bench: CertifyBench, contestants: Sequence[Contestant], max_draft: int):
        self._bench = bench
        self._rows: list[SampledRow] = []
        self.drafters: dict[str, Drafter] = {PLAIN: NoDrafter()}
        engine = bench.engine
        for each in contestants:
            config = each.config(max_draft)
            # In the engine's thread: there whatever computes must be loaded.
            self.drafters[str(each)] = engine.call(
                lambda _, config=config: make_drafter(config, engine.machinery.setting)
            ).result()
        engine.observe(self._watch)

    def run(self, prompts: Sequence[DemoPrompt], params: SamplingParams, num_rounds: int) -> Table:
        names = list(self.drafters)
        for name in names:  # code is compiled, memory touched
            self._answer(name, prompts[0], params)
        table: Table = {}
        turn = 0
        for round_number in range(num_rounds):
            for prompt in prompts:
                for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
                    result = self._answer(name, prompt, params)
                    for group in (prompt.title, ALL):
                        runs = table.setdefault(group, {}).setdefault(name, Runs())
                        runs.add(round_number, result, self._rows)
                turn += 1
                print(".", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return table

    def _answer(self, name: str, prompt: DemoPrompt, params: SamplingParams) -> GenerationResult:
        self._bench.use(self.drafters[name])
        self._rows.clear()
        (result,) = self._bench.run([Ask(list(prompt.messages), params)], batch=1)
        return result

    def _watch(self, report: StepReport) -> None:
        self._rows.extend(report.sampled)


def show(title: str, own: Mapping[str, Mapping[str, Any]]) -> None:
    heads = f"{'tok/s':>8}{'x plain':>9}{'spread':>14}{'tok/pass':>10}{'c':>8}"
    heads += "".join(f"{f'a{i + 1}':>6}" for i in range(POSITIONS))
    print(f"\n{title:<24}{heads}")
    for name, each in own.items():
        low, high = each["x_plain_spread"]
        line = f"{each['tokens_per_s']:>8.1f}{each['x_plain']:>9.2f}{low:>8.2f}-{high:.2f}".ljust(
            31
        )
        line += f"{each['mean_acceptance_length']:>10.2f}{each['draft_cost_ratio']:>8.3f}"
        line += "".join(f"{rate:>6.2f}" for rate in each["acceptance_by_position"][:POSITIONS])
        print(f"{name:<24}{line}" + (f"  faults: {each['faults']}" if each["faults"] else ""))


def race(args: argparse.Namespace, prompts: Sequence[DemoPrompt]) -> dict[str, Any]:
    contestants = [Contestant.parse(text) for text in args.drafters.split(",")]
    contestants = [each for each in contestants if each.name != PLAIN]
    results: dict[str, Any] = {}
    plain = SpeculationConfig(drafter=PLAIN, max_draft=args.draft_tokens)
    # A prefix found in the cache would spare later drafters what the first one paid.
    options: dict[str, Any] = {"enable_prefix_caching": False, "num_threads": args.threads}
    with CertifyBench(args.model, plain, **options) as bench:
        engine = bench.engine
        started = Race(bench, contestants, args.draft_tokens)
        for temperature in [float(text) for text in args.temperatures.split(",")]:
            params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=1)
            table = started.run(prompts, params, args.rounds)
            results[str(temperature)] = {
                group: {name: summary(own[name], own[PLAIN]) for name in started.drafters}
                for group, own in sorted(table.items(), key=lambda each: each[0] == ALL)
            }
            for group, own in results[str(temperature)].items():
                show(f"{group}, T={temperature:g}", own)
        runner, machinery = engine.machinery.runner, engine.machinery
    return {
        "by_temperature": results,
        "row_cost": runner.row_cost,
        "pass_s": runner.pass_s,
        "dtype": str(machinery.dtype),
        "kernels": machinery.kernels,
        "threads": machinery.num_threads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafters", default="ngram,suffix,auto", help="name or name:MODEL, ...")
    parser.add_argument("--draft-tokens", type=int, default=15)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--prompts", help="JSON lines to take prompts from")
    parser.add_argument("--limit", type=int, help="prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    prompts = read_prompts(Path(args.prompts), args.limit) if args.prompts else list(DEMO_PROMPTS)
    described = {"benchmark": "drafters", "model": args.model, "num_prompts": len(prompts)}
    print(json.dumps(described | race(args, prompts) | provenance()))


if __name__ == "__main__":
    main()
