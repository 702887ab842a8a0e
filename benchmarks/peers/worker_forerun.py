"""forerun as a contestant: its Engine in this process, asked by one thread a request."""

from __future__ import annotations

from typing import Any

from serving import Watch, drive_streams, serve, versions

from forerun import Engine, SamplingParams


class Forerun:
    """One engine, with or without its drafter."""

    def __init__(self, options: dict[str, Any]) -> None:
        short = {} if options["draft"] is None else {"max_draft": options["draft"]}
        self._engine = Engine.from_pretrained(
            options["model"],
            drafter="none" if options["mode"] == "plain" else options["mode"],
            dtype=options["dtype"],
            num_threads=options["threads"],
            max_model_len=options["max_model_len"],
            max_num_seqs=max(options["max_concurrency"], 1),
            enable_prefix_caching=False,
            **short,
        )

    def describe(self) -> dict[str, Any]:
        machinery = self._engine.machinery
        return {
            "dtype": str(machinery.dtype).removeprefix("torch."),
            "versions": versions("forerun", "torch", "numba"),
            "settings": {
                "kernels": machinery.kernels,
                "threads": machinery.num_threads,
                "exact_bits": machinery.exact_bits.reason,
                "max_draft": self._engine.config.speculation.max_draft,
            },
        }

    def answer(self, prompts: list[list[int]], concurrency: int, max_tokens: int) -> list[Watch]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)

        def stream(prompt: list[int], watch: Watch) -> None:
            result = None
            for chunk in self._engine.stream(prompt, params):
                watch.take(chunk.token_ids)
                result = chunk.result
            assert result is not None, "the last chunk carries the result"
            if result.error is not None:
                raise result.error
            stats = result.stats
            watch.count(
                drafted=stats.num_drafted, accepted=stats.num_accepted, steps=stats.num_steps
            )

        return drive_streams(stream, prompts, concurrency)

    def close(self) -> None:
        self._engine.close()


if __name__ == "__main__":
    serve(Forerun)
