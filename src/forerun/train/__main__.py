"""`python -m forerun.train data`: training data from the command line, progress line by line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..engine.engine import Engine
from ..errors import ForerunError
from ..model.loader import open_model
from ..registry import resolve_model
from .data import DataSettings, Progress, make_rows

__all__ = ["main"]

MAX_MODEL_LEN = 1024  # of prompt and answer; long enough for both, and cheap
AT_ONCE = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    asked = _parser().parse_args(arguments)
    try:
        _make_data(asked)
    except ForerunError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command goes on from here\n")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m forerun.train")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    data = commands.add_parser("data", help="prompts answered by the model itself, on disk")
    data.add_argument("--model", required=True, help="pulled name, folder, or .gguf file")
    data.add_argument("--out", required=True, type=Path, help="folder of the rows")
    data.add_argument("--tokens", required=True, type=int, help="answer tokens to have at the end")
    data.add_argument("--data", type=Path, help='JSON lines with "prompt" or "messages"')
    data.add_argument("--seed", type=int, default=0)
    data.add_argument("--hours", type=float, help="end after the batch in which so many are over")
    return parser


def _make_data(asked: argparse.Namespace) -> None:
    trained = open_model(resolve_model(asked.model)).config.max_positions
    engine = Engine.from_pretrained(
        asked.model,
        drafter="none",
        max_model_len=min(MAX_MODEL_LEN, trained),
        max_num_seqs=AT_ONCE,
        max_num_batched_tokens=512,
    )
    with engine:
        make_rows(
            engine,
            asked.out,
            num_tokens=asked.tokens,
            model=asked.model,
            settings=DataSettings(seed=asked.seed),
            data=asked.data,
            max_s=None if asked.hours is None else asked.hours * 3600,
            report=_say,
        )


def _say(progress: Progress) -> None:
    sys.stdout.write(describe(progress) + "\n")
    sys.stdout.flush()


def describe(progress: Progress) -> str:
    """Say how far a run is, in one line."""
    if progress.tokens_per_s is None and not progress.is_done:
        return (
            f"to make: {progress.target_tokens:,} answer tokens, about "
            f"{progress.expected_rows:,} rows, {progress.expected_bytes / 1e6:.0f} MB; "
            f"there: {progress.num_tokens:,} tokens in {progress.num_rows:,} rows"
        )
    line = (
        f"{progress.num_tokens:,} of {progress.target_tokens:,} answer tokens, "
        f"{progress.num_rows:,} rows, {progress.num_bytes / 1e6:.1f} MB, "
        f"{progress.tokens_per_s or 0:.0f} tokens/s"
    )
    if progress.dropped:
        reasons = ", ".join(f"{count} {name}" for name, count in sorted(progress.dropped.items()))
        line += f"; dropped: {reasons}"
    if progress.is_done:
        return f"done: {line}"
    return line + (
        f"; at the end {progress.expected_rows:,} rows, {progress.expected_bytes / 1e6:.0f} MB, "
        f"in {(progress.remaining_s or 0) / 3600:.1f} h"
    )


if __name__ == "__main__":
    sys.exit(main())
