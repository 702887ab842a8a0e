"""What a look-up drafter costs a step, by the length of the context: it must not grow.

Real text (the prompts of a file, or this repository's own sources) is fed token by token, as an
engine would, and each step's look-up is timed.

    python benchmarks/lookup.py --tokens 32768
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from forerun.config import SpeculationConfig
from forerun.draft.base import make_drafter
from forerun.engine.setup import make_codec
from forerun.measure.provenance import provenance
from forerun.model.loader import open_model
from forerun.registry import resolve_model
from forerun.types import DraftRequest, RequestOutcome


def real_tokens(count: int, prompts: str | None) -> list[int]:
    codec = make_codec(open_model(resolve_model("smollm2-135m")))
    sources = sorted(Path(__file__).parent.parent.joinpath("src").rglob("*.py"))
    text = Path(prompts).read_text() if prompts else "\n".join(p.read_text() for p in sources)
    tokens = codec.encode(text)
    while len(tokens) < count:
        tokens += tokens
    return tokens[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--window", type=int, default=1024, help="steps per line of the table")
    parser.add_argument("--drafter", default="ngram", choices=["ngram", "suffix"])
    parser.add_argument("--max-draft", type=int, default=15)
    parser.add_argument("--prompts", help="a text file to take the tokens from")
    args = parser.parse_args()
    tokens = real_tokens(args.tokens, args.prompts)
    config = SpeculationConfig(drafter=args.drafter)
    drafter = make_drafter(config)
    history: list[int] = []
    drafter.start(DraftRequest(0, history, 0))
    taken: list[float] = []
    for token in tokens:
        history.append(token)
        begin = time.perf_counter()
        drafter.propose([DraftRequest(0, history, args.max_draft)])
        drafter.observe([RequestOutcome(0, 0, 0, (token,), False)], None)
        taken.append(time.perf_counter() - begin)
    rows = []
    print(f"{'context':>8}{'median us':>11}{'p99 us':>9}")
    for end in range(args.window, len(tokens) + 1, args.window):
        window = sorted(taken[end - args.window : end])
        median, p99 = statistics.median(window) * 1e6, window[int(len(window) * 0.99)] * 1e6
        if end & (end - 1) == 0 or end == len(tokens):
            rows.append({"context": end, "median_us": round(median, 1), "p99_us": round(p99, 1)})
            print(f"{end:>8}{median:>11.1f}{p99:>9.1f}")
    begin = time.perf_counter()
    fresh = make_drafter(config)
    fresh.start(DraftRequest(1, tokens, 0))
    fresh.propose([DraftRequest(1, tokens, args.max_draft)])
    whole_ms = (time.perf_counter() - begin) * 1e3
    print(f"indexing a prompt of {len(tokens)} tokens at once: {whole_ms:.0f} ms")
    result = {
        "benchmark": "lookup",
        "drafter": args.drafter,
        "rows": rows,
        "prompt_ms": round(whole_ms, 1),
    }
    print(json.dumps(result | provenance()))


if __name__ == "__main__":
    main()
