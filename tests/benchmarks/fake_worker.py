"""A worker without a model: answers with the prompt reversed, or misbehaves as argv[1] asks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "peers"))

from serving import Watch, drive_streams, serve

END = 2


class Fake:
    def __init__(self, options: dict) -> None:
        if options.get("refuses"):
            raise RuntimeError("no such instructions here")
        os.write(1, b"a tool that prints to standard output\n")
        self._dies = options.get("dies", False)

    def describe(self) -> dict:
        return {"dtype": "float32", "versions": {"fake": "1"}, "settings": {}}

    def answer(self, prompts: list, concurrency: int, max_tokens: int) -> list[Watch]:
        if self._dies:
            os.write(2, b"last words\n")
            os.abort()

        def stream(prompt: list[int], watch: Watch) -> None:
            if prompt == [0]:
                raise ValueError("cannot answer that")
            for token in [*reversed(prompt), END][:max_tokens]:
                watch.take([token])
            watch.count(drafted=0, accepted=0, steps=len(watch.token_ids))

        return drive_streams(stream, prompts, concurrency)

    def close(self) -> None:
        pass


if __name__ == "__main__":
    assert json.loads(sys.argv[1]) is not None
    serve(Fake)
