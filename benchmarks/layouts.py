"""float32 linear layers in the plain layout against the packed one, by number of rows.

All layers of SmolLM2-135M's shapes, once; interleaved, medians.

    python benchmarks/layouts.py [--rows 1 2 4 8 16 32] [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from forerun.device import available_cpus
from forerun.measure.provenance import provenance
from forerun.model.linear import OneDnnLinear, PlainLinear

SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576)] * 30 + [(576, 49152)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(available_cpus())
    weights = [torch.randn(outputs, inputs) * 0.05 for inputs, outputs in SHAPES]
    layouts = {
        "plain": [PlainLinear(weight, None) for weight in weights],
        "packed": [OneDnnLinear(weight, None) for weight in weights],
    }
    rows = []
    print(f"{'rows':>6}{'plain ms':>10}{'packed ms':>11}")
    for count in args.rows:
        taken: dict[str, list[float]] = {name: [] for name in layouts}
        inputs = {width: torch.randn(count, width) for width, _ in SHAPES}
        for _ in range(args.repeats):
            for name, layers in layouts.items():
                begin = time.perf_counter()
                for layer, (width, _) in zip(layers, SHAPES, strict=True):
                    layer(inputs[width])
                taken[name].append((time.perf_counter() - begin) * 1e3)
        plain, packed = (statistics.median(taken[name]) for name in ("plain", "packed"))
        print(f"{count:>6}{plain:>10.1f}{packed:>11.1f}")
        rows.append({"rows": count, "plain_ms": plain, "packed_ms": packed})
    print(json.dumps({"benchmark": "layouts", "rows": rows, **provenance()}))


if __name__ == "__main__":
    main()
