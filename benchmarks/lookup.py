"""What a look-up drafter costs a step, by the length of the context: it must not grow.

Real text (the prompts of a file, or this repository's own sources) is fed token by token, as an
engine would, and each step's look-up is timed; then what taking in a whole prompt takes. With
--store the suffix drafter has so many tokens of other outputs beside it, and what keeping and
forgetting one takes is timed too.

    python benchmarks/lookup.py --tokens 32768
    python benchmarks/lookup.py --drafter suffix --tokens 8192 --store 100000
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from forerun.draft.base import Drafter
from forerun.draft.ngram import NgramDrafter
from forerun.draft.suffix import SuffixDrafter
from forerun.draft.suffix_store import SuffixStore
from forerun.engine.setup import make_codec
from forerun.measure.provenance import provenance
from forerun.model.loader import open_model
from forerun.params import SamplingParams
from forerun.registry import resolve_model
from forerun.types import DraftRequest, RequestOutcome

OUTPUT = 500  # tokens of each output in the store
PLAIN = SamplingParams()
KEPT = 20  # outputs that are timed as they come in, and push out as many


def real_tokens(count: int, prompts: str | None) -> list[int]:
    codec = make_codec(open_model(resolve_model("smollm2-135m")))
    sources = sorted(Path(__file__).parent.parent.joinpath("src").rglob("*.py"))
    text = Path(prompts).read_text() if prompts else "\n".join(p.read_text() for p in sources)
    tokens = codec.encode(text)
    while len(tokens) < count:
        tokens += tokens
    return tokens[:count]


def make(name: str, store: SuffixStore | None) -> Drafter:
    return NgramDrafter(1, 4) if name == "ngram" else SuffixDrafter(store)


def step_times(drafter: Drafter, tokens: list[int], max_draft: int) -> list[float]:
    """Feed tokens one by one: the seconds of each step."""
    history: list[int] = []
    drafter.start(DraftRequest(0, history, 0))
    taken: list[float] = []
    for token in tokens:
        history.append(token)
        request = DraftRequest(0, history, max_draft, params=PLAIN)
        begin = time.perf_counter()
        drafter.propose([request])
        drafter.observe([RequestOutcome(0, 0, 0, (token,), False)], None)
        taken.append(time.perf_counter() - begin)
    return taken


def filled(tokens: list[int], num_tokens: int) -> tuple[SuffixStore, float]:
    """Fill a store to its brim: the store, and the milliseconds that one more output takes."""
    store = SuffixStore(num_tokens, 3600, shared=True)
    outputs = [tokens[at : at + OUTPUT] for at in range(0, num_tokens + KEPT * OUTPUT, OUTPUT)]
    for output in outputs[:-KEPT]:
        store.add("", output)
    begin = time.perf_counter()
    for output in outputs[-KEPT:]:
        store.add("", output)
    return store, (time.perf_counter() - begin) / KEPT * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--window", type=int, default=1024, help="steps per line of the table")
    parser.add_argument("--drafter", default="ngram", choices=["ngram", "suffix"])
    parser.add_argument("--max-draft", type=int, default=15)
    parser.add_argument("--store", type=int, default=0, help="tokens of other outputs (suffix)")
    parser.add_argument("--prompts", help="a text file to take the tokens from")
    args = parser.parse_args()
    if args.store and args.drafter != "suffix":
        parser.error("--store is the suffix drafter's")
    spare = args.store + KEPT * OUTPUT if args.store else 0
    everything = real_tokens(args.tokens + spare, args.prompts)
    tokens = everything[: args.tokens]
    store, keep_ms = filled(everything[args.tokens :], args.store) if args.store else (None, None)
    taken = step_times(make(args.drafter, store), tokens, args.max_draft)
    rows = []
    print(f"{'context':>8}{'median us':>11}{'p99 us':>9}")
    for end in range(args.window, len(tokens) + 1, args.window):
        window = sorted(taken[end - args.window : end])
        median, p99 = statistics.median(window) * 1e6, window[int(len(window) * 0.99)] * 1e6
        if end & (end - 1) == 0 or end == len(tokens):
            rows.append({"context": end, "median_us": round(median, 1), "p99_us": round(p99, 1)})
            print(f"{end:>8}{median:>11.1f}{p99:>9.1f}")
    begin = time.perf_counter()
    fresh = make(args.drafter, store)
    fresh.start(DraftRequest(1, tokens, 0))
    fresh.propose([DraftRequest(1, tokens, args.max_draft)])
    whole_ms = (time.perf_counter() - begin) * 1e3
    print(f"indexing a prompt of {len(tokens)} tokens at once: {whole_ms:.0f} ms")
    if keep_ms is not None:
        print(f"keeping an output of {OUTPUT} tokens and forgetting another: {keep_ms:.1f} ms")
    result = {
        "benchmark": "lookup",
        "drafter": args.drafter,
        "store_tokens": args.store,
        "rows": rows,
        "prompt_ms": round(whole_ms, 1),
        "keep_ms": None if keep_ms is None else round(keep_ms, 2),
    }
    print(json.dumps(result | provenance()))


if __name__ == "__main__":
    main()
