"""Whose bits depend on the rows beside them in packed bfloat16 linear layers; what a cure costs.

For each shape: from how many rows on a row differs from itself computed alone; whether its place in
a call matters; which row counts agree with each other. Then the time of all shapes in one call
against pieces of 32 rows, interleaved medians. Needs a processor with fast bfloat16.

    python benchmarks/linear_bits.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import combinations

import torch
from torch import Tensor

from forerun.device import available_cpus
from forerun.measure.provenance import provenance
from forerun.model.linear import Linear, pack_linear

# (in, out) of SmolLM2-135M, and of models of Qwen2-0.5B's and Llama-1B's size
SMALL = [(576, 960), (576, 576), (576, 3072), (1536, 576)]
OTHERS = [(576, 49152), (896, 1152), (896, 9728), (4864, 896), (2048, 2560), (2048, 16384)]
COUNTS = (2, 3, 8, 16, 31, 32, 33, 40, 48, 64)
LARGE = (64, 128, 256, 512, 1024)
LAYERS = 30
PIECE = 32


def make(num_inputs: int, num_outputs: int) -> Linear:
    return pack_linear((torch.randn(num_outputs, num_inputs) * 0.05).bfloat16())


def describe_bits(shape: tuple[int, int]) -> dict[str, object]:
    linear, x = make(*shape), torch.randn(max(LARGE), shape[0]).bfloat16()
    alone = torch.cat([linear(x[row : row + 1]) for row in range(max(COUNTS))])
    large = {count: linear(x[:count])[: LARGE[0]] for count in LARGE}
    moved = linear(x[: LARGE[1]].roll(7, 0)).roll(-7, 0)
    return {
        "shape": shape,
        "differs_from_alone": [n for n in COUNTS if not torch.equal(linear(x[:n]), alone[:n])],
        "place_matters": not torch.equal(moved, linear(x[: LARGE[1]])),
        "disagree": [p for p in combinations(LARGE, 2) if not torch.equal(*map(large.get, p))],
    }


def in_pieces(linear: Linear, x: Tensor) -> Tensor:
    return torch.cat([linear(piece) for piece in x.split(PIECE)])


def time_pieces(num_rows: int, layers: list[list[Linear]], repeats: int) -> dict[str, float]:
    inputs = [torch.randn(num_rows, num_inputs).bfloat16() for num_inputs, _ in SMALL]
    taken: dict[str, list[float]] = {"whole_ms": [], "pieces_ms": []}
    for _ in range(repeats):
        for name, run in (("whole_ms", lambda linear, x: linear(x)), ("pieces_ms", in_pieces)):
            begin = time.perf_counter()
            for layer in layers:
                for linear, x in zip(layer, inputs, strict=True):
                    run(linear, x)
            taken[name].append((time.perf_counter() - begin) * 1e3)
    return {name: round(statistics.median(times), 1) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(available_cpus())
    torch.manual_seed(0)
    bits = [describe_bits(shape) for shape in [*SMALL, *OTHERS]]
    for row in bits:
        print(
            f"{row['shape']!s:<15} differs from alone at {row['differs_from_alone']}, place "
            f"matters: {row['place_matters']}, disagree: {row['disagree']}"
        )
    layers = [[make(*shape) for shape in SMALL] for _ in range(LAYERS)]
    rows = (1, 16, 32, 48, 64, 128, 256, 512)
    times = [{"rows": count} | time_pieces(count, layers, args.repeats) for count in rows]
    for each in times:
        print(f"{each['rows']:>4} rows: whole {each['whole_ms']} ms, pieces {each['pieces_ms']} ms")
    print(json.dumps({"benchmark": "linear_bits", "bits": bits, "times": times, **provenance()}))


if __name__ == "__main__":
    main()
