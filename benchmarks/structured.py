"""What a constraint costs, and what it gives: JSON by a schema, with and without drafts.

Four ways, in turn: free text and constrained, each plain and with drafts (what the grammar forces,
else look-up). Free answers go on to as many tokens as the constrained one has.

python benchmarks/structured.py --model smollm2-135m
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from forerun import Engine, SamplingParams
from forerun.constraint import Constraint
from forerun.device import available_cpus
from forerun.measure.provenance import provenance

TEXT = {"type": "string", "maxLength": 60}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 100000}


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


CASES = {
    "person": (
        "Anna Berg is 34 years old, lives in Oslo and works as a nurse. Write this as JSON.",
        record(name=TEXT, age=NUMBER, city=TEXT, occupation=TEXT),
    ),
    "orders": (
        "Order 17: three chairs at 40 euros each. Order 18: one table at 210 euros. Write as JSON.",
        record(
            orders={
                "type": "array",
                "minItems": 2,
                "maxItems": 2,
                "items": record(order_number=NUMBER, item=TEXT, quantity=NUMBER, price=NUMBER),
            }
        ),
    ),
    "weather": (
        "Give the weather for Rome tomorrow as JSON: sunny, 29 degrees, wind from the west.",
        record(
            location=TEXT,
            conditions={"enum": ["sunny", "cloudy", "rainy", "snowy"]},
            temperature_celsius=NUMBER,
            wind_direction={"enum": ["north", "east", "south", "west"]},
        ),
    ),
    "review": (
        'Rate this review: "The film was far too long, but the music was lovely." Answer in JSON.',
        record(
            sentiment={"enum": ["positive", "negative", "mixed"]},
            confidence_percent={"type": "integer", "minimum": 0, "maximum": 100},
            mentions_music={"type": "boolean"},
            mentions_length={"type": "boolean"},
            summary=TEXT,
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    engine = Engine.from_pretrained(
        args.model, dtype=args.dtype, num_threads=args.threads, enable_prefix_caching=False
    )
    rows = []
    print(
        f"{'':10}{'tokens':>8}{'passes':>8}"
        f"{'free':>9}{'+ drafts':>9}{'JSON':>9}{'+ drafts':>9}{'gain':>8}   same text"
    )
    for name, (prompt, schema) in CASES.items():
        messages = [{"role": "user", "content": prompt}]
        constraint = Constraint.json_schema(schema)
        base = SamplingParams(temperature=0, max_tokens=256, constraint=constraint, max_draft=0)
        (first,) = engine.generate([messages], base)
        count = len(first.token_ids)
        ways = {
            "free": SamplingParams(
                temperature=0, max_tokens=count, min_tokens=count, max_draft=0, ignore_eos=True
            ),
            "free_drafts": SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
            "json": base,
            "json_drafts": SamplingParams(temperature=0, max_tokens=256, constraint=constraint),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        results = {}
        for _ in range(args.rounds):
            for way, params in ways.items():
                (results[way],) = engine.generate([messages], params)
                seconds[way].append(results[way].stats.tpot_s)
        tpot = {way: statistics.median(values) for way, values in seconds.items()}
        plain, drafted = results["json"], results["json_drafts"]
        valid = json.loads(drafted.text) is not None
        row = {
            "case": name,
            "tokens": count,
            "passes": drafted.stats.num_steps,
            "tokens_per_s": {way: round(1 / value, 1) for way, value in tpot.items()},
            "gain": round(tpot["json"] / tpot["json_drafts"], 2),
            "mask_cost": round(tpot["json"] / tpot["free"], 3),
            "same_text": plain.token_ids == drafted.token_ids and valid,
        }
        rows.append(row)
        rates = row["tokens_per_s"]
        print(
            f"{name:10}{count:>8}{row['passes']:>8}"
            f"{rates['free']:>9}{rates['free_drafts']:>9}{rates['json']:>9}{rates['json_drafts']:>9}"
            f"{row['gain']:>7} x   {'yes' if row['same_text'] else 'NO'}"
        )
    machinery = engine.machinery
    setting = {
        "model": args.model,
        "dtype": str(machinery.dtype).removeprefix("torch."),
        "kernels": machinery.kernels,
        "threads": machinery.num_threads,
    }
    engine.close()
    print(json.dumps({**setting, "rows": rows, "provenance": provenance()}))


if __name__ == "__main__":
    main()
