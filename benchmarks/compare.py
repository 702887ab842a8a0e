"""forerun beside other tools: same weights, same prompts, greedy, everybody in turn.

    python benchmarks/compare.py --setup                         once: install, convert
    python benchmarks/compare.py --prompts FILE... --rounds 3    one request at a time
    python benchmarks/compare.py --load 4,16,32                  many at once, output tokens/s

Each tool runs in a process of its own (benchmarks/peers) that stays loaded; for each prompt
everybody answers once, in an order that rotates, so a machine that drifts drifts for all. Prints
tables and, as the last line, one JSON object with provenance; writes compare.json (every run),
compare.png and each tool's log to the folder of `--out`. docs/compare.md says what is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers import plot, table
from peers.contestants import PEERS, Contestant, choose
from peers.install import Places, Tools, set_up
from peers.process import Worker, close_all
from peers.starting import Settings, start_all
from peers.summary import Block, PromptIds, Run, Spread, load_rows, prompt_ratios, rows
from peers.turns import answer_in_turn, idle_shares, load_in_turn

from forerun.device import available_cpus, choose_device, has_fast_bf16
from forerun.engine.setup import make_codec
from forerun.home import forerun_home
from forerun.measure.prompts import DEMO_PROMPTS, DemoPrompt, read_prompts
from forerun.measure.provenance import provenance
from forerun.model.loader import ModelFiles, open_model
from forerun.registry import resolve_model

IDLE_S = 2.0  # how long idle workers are watched
IDLE_SHARE = 0.05  # of a processor: more than this is not idle


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def render(args: argparse.Namespace, files: ModelFiles) -> list[PromptIds]:
    """Turn prompts into token ids with the model's own template, once for everybody."""
    prompts: list[DemoPrompt] = []
    for path in args.prompts:
        prompts += read_prompts(path, args.limit)
    codec = make_codec(files)
    found = []
    for prompt in prompts or DEMO_PROMPTS:
        token_ids = tuple(codec.encode_chat(list(prompt.messages)))
        if len(token_ids) > args.max_prompt_tokens:
            report(f"left out: a prompt of {prompt.title} with {len(token_ids)} tokens")
        else:
            found.append(PromptIds(len(found), prompt.title, token_ids))
    return found


class Comparison:
    """Everything that one invocation needs, and what came of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = provenance()
        fast_bf16 = has_fast_bf16(choose_device("cpu"))
        chosen = choose(args.dtype, args.only, args.skip, args.also, bool(args.load))
        self.contestants = [(each, each.computed_dtype(fast_bf16)) for each in chosen]
        model = resolve_model(args.model)
        self.places = Places(args.peers_dir.resolve(), model)
        self.files = open_model(model)
        self.reference = str(self._reference(chosen))
        self.hellos: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.idle: dict[str, float] = {}
        self.peak_rss_bytes: dict[str, int] = {}
        self.results: list[Run] | list[Block] = []

    def set_up(self) -> bool:
        """Install and convert; whether all of it worked."""
        tools = Tools(self.args.python, self.args.jobs)
        failures = set_up(self.places, self.contestants, tools, report)
        for peer in dict.fromkeys(each.peer for each, _ in self.contestants):
            print(f"{peer}: {failures.get(peer, 'ready')}")
        return not failures

    def measure(self) -> None:
        """Start everybody, let them run in turn, end them."""
        args = self.args
        self.prompts = render(args, self.files)
        longest = max(len(prompt.token_ids) for prompt in self.prompts)
        settings = Settings(
            threads=args.threads or available_cpus(),
            max_model_len=-(-(longest + args.max_tokens + 64) // 256) * 256,
            max_concurrency=max(args.load, default=1),
            eos_ids=tuple(self.files.config.eos_token_ids),
        )
        args.out.mkdir(parents=True, exist_ok=True)
        workers, self.failures = start_all(
            self.contestants, self.places, settings, self.prompts[:2], args.out, report
        )
        try:
            self.hellos = {name: worker.hello for name, worker in workers.items()}
            time.sleep(1)
            self._watch_idle(workers)
            self._collect(workers, settings)
            for name, worker in workers.items():
                self.peak_rss_bytes[name] = worker.peak_rss_bytes()
        finally:
            close_all(workers.values())

    def show(self) -> dict[str, Any]:
        """Print tables, draw, and sum up for JSON."""
        names = [str(each) for each, _ in self.contestants]
        title = f"{self.args.model}, {self.begin['processor']}, greedy, {self.begin['time']}"
        picture = self.args.out / "compare.png"
        if self.args.load:
            found = load_rows(self._blocks(), names, self.reference)
            print(f"\n{table.load_table(found)}\n")
            drawn = plot.draw_load(found, title, picture) if found else "nothing to draw"
            groups = []
        else:
            plain_of = {str(each): str(each.plain) for each, _ in self.contestants}
            found = rows(self._runs(), plain_of, self.reference)
            names = list(dict.fromkeys(run.group for run in self._runs()))
            groups = [
                row for each in names for row in rows(self._runs(), plain_of, self.reference, each)
            ]
            print(f"\n{table.main_table(found, self.hellos)}\n")
            print(f"{table.group_table(groups, names)}\n")
            ratios = {name: prompt_ratios(self._runs(), name, self.reference) for name in plain_of}
            drawn = plot.draw(found, ratios, title, picture) if found else "nothing to draw"
        for name, reason in self.failures.items():
            print(f"{name}: {reason}")
        report(drawn)
        others = Spread.of(each.others_share for each in self.results)
        if others is not None:
            report(
                f"other programs took {others.median:.0%} of a processor (median; quartiles "
                f"{others.low:.0%}-{others.high:.0%}, at most {others.most:.0%})"
            )
        return {
            "others_share": dataclasses.asdict(others) if others else None,
            "rows": [row.to_dict() for row in found],
            "groups": [row.to_dict() for row in groups],
        }

    def to_dict(self) -> dict[str, Any]:
        """List what was run and how, without the runs."""
        options = {name: getattr(self.args, name) for name in OPTIONS}
        return {
            "benchmark": "compare",
            "model": self.args.model,
            "reference": self.reference,
            **options,
            "num_prompts": len(self.prompts),
            "contestants": self.hellos,
            "failures": self.failures,
            "idle_share": self.idle,
            "peak_rss_bytes": self.peak_rss_bytes,
            **self.begin,
            "end": {name: provenance()[name] for name in ("time", "load_average")},
        }

    def save(self, summary: dict[str, Any]) -> None:
        """Write everything, every run included."""
        whole = self.to_dict() | summary
        whole["prompts"] = [dataclasses.asdict(each) for each in self.prompts]
        whole["runs"] = [dataclasses.asdict(each) for each in self.results]
        unfinished = self.args.out / "compare.json.unfinished"
        unfinished.write_text(json.dumps(whole) + "\n")
        unfinished.rename(self.args.out / "compare.json")

    def _collect(self, workers: dict[str, Worker], settings: Settings) -> None:
        args = self.args
        if args.load:
            coming: Any = load_in_turn(
                workers, self.prompts, args.load, args.rounds, args.requests_per_slot,
                args.max_tokens, args.settle, report, self.failures,
            )  # fmt: skip
        else:
            coming = answer_in_turn(
                workers, self.prompts, args.rounds, args.max_tokens, settings.eos_ids,
                args.settle, report, self.failures,
            )  # fmt: skip
        last_round = 1
        try:
            for result in coming:
                if result.round_number != last_round:
                    self.save({})  # a long run that is cut short leaves its rounds
                    last_round = result.round_number
                self.results.append(result)
        except KeyboardInterrupt:
            report("interrupted: summing up what there is")

    def _watch_idle(self, workers: dict[str, Worker]) -> None:
        self.idle = idle_shares(workers, IDLE_S)
        for name, share in self.idle.items():
            if share > IDLE_SHARE:
                report(f"{name} takes {share:.0%} of a processor while idle: it disturbs the rest")

    def _reference(self, chosen: Sequence[Contestant]) -> Contestant:
        """Choose forerun plain to compare with, in the first format that takes part."""
        own = [each.plain for each in chosen if each.peer == "forerun"]
        return own[0] if own else Contestant("forerun", "plain")

    def _runs(self) -> list[Run]:
        return [each for each in self.results if isinstance(each, Run)]

    def _blocks(self) -> list[Block]:
        return [each for each in self.results if isinstance(each, Block)]


OPTIONS = ("max_tokens", "rounds", "limit", "max_prompt_tokens", "settle", "load", "threads",
           "requests_per_slot")  # fmt: skip


def levels(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--setup", action="store_true", help="install peers and convert weights, then end")
    add("--peers-dir", type=Path, default=forerun_home() / "peers", help="where peers live")
    add("--python", default="python3.11", help="makes the peers' virtual environments")
    add("--jobs", type=int, default=available_cpus(), help="compilers at once during --setup")
    add("--model", default="smollm2-135m", help="a pulled name or a Hugging Face folder")
    add("--prompts", nargs="+", type=Path, default=[], metavar="FILE",
        help='JSON lines with "prompt" or "turns"; default: our own four')  # fmt: skip
    add("--limit", type=int, help="prompts of each category and file")
    add("--max-prompt-tokens", type=int, default=1500, help="longer prompts are left out")
    add("--max-tokens", type=int, default=128)
    add("--rounds", type=int, default=3)
    add("--threads", type=int, help="of everybody; default: all processors at hand")
    add("--dtype", nargs="+", default=[], choices=["auto", "bfloat16", "float32"],
        help="formats that everybody takes part in; auto: what suits the tool here")  # fmt: skip
    add("--only", nargs="+", default=[], metavar="WHO", help=f"of {', '.join(PEERS)}, or patterns")
    add("--skip", nargs="+", default=[], metavar="WHO")
    add("--also", nargs="+", default=[], metavar="PEER:MODE[:DRAFT][@DTYPE]",
        help="more contestants, such as llama.cpp:ngram-mod or openvino:lookup:8")  # fmt: skip
    add("--load", type=levels, default=[], metavar="N,N", help="measure so many requests at once")
    add("--requests-per-slot", type=int, default=2, help="size of a block under --load")
    add("--settle", type=float, default=0.3, help="seconds of silence between contestants")
    add("--out", type=Path, default=Path("build/compare"), help="folder for results and logs")
    return parser.parse_args()


def main() -> int:
    # ended from outside it does what it does when interrupted: sum up, and end its workers
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args = parse_args()
    comparison = Comparison(args)
    if args.setup:
        return 0 if comparison.set_up() else 1
    comparison.measure()
    summary = comparison.show()
    comparison.save(summary)
    print(json.dumps(comparison.to_dict() | summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
