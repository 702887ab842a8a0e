"""vLLM on the CPU as a contestant: its engine in this process, stepped here, plain or n-gram.

In one process on purpose: a server's two more processes would want the same few cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from serving import Delivery, Watch, drive_steps, serve, versions


class Vllm:
    """One engine and the requests that are in it."""

    def __init__(self, options: dict[str, Any]) -> None:
        cpus = sorted(os.sched_getaffinity(0))[: options["threads"]]
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cpus)))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GB
        # its cache of compiled models cannot be read back in 0.32: every start would compile anew
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("DO_NOT_TRACK", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from vllm import EngineArgs, LLMEngine, SamplingParams  # here: they read the settings above
        from vllm.sampling_params import RequestOutputKind

        speculation = None
        if options["mode"] == "ngram":
            speculation = {
                "method": "ngram",
                "num_speculative_tokens": options["draft"],
                "prompt_lookup_max": options["ngram"],
                "prompt_lookup_min": 2,
            }
        self._options = options
        self._speculation = speculation
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=options["model"],
                dtype=options["dtype"],
                max_model_len=options["max_model_len"],
                max_num_seqs=max(options["max_concurrency"], 1),
                enable_prefix_caching=False,
                generation_config="vllm",
                speculative_config=speculation,
            )
        )
        self._make_params = lambda max_tokens: SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            stop_token_ids=options["eos_ids"],
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
        )

    def describe(self) -> dict[str, Any]:
        import torch

        return {
            "dtype": str(self._engine.model_config.dtype).removeprefix("torch."),
            "versions": versions("vllm-cpu", "torch"),
            "settings": {
                "threads": torch.get_num_threads(),
                "speculative_config": self._speculation,
                "preload": os.environ.get("LD_PRELOAD", ""),
            },
        }

    def answer(self, prompts: list[list[int]], concurrency: int, max_tokens: int) -> list[Watch]:
        params = self._make_params(max_tokens)

        def submit(key: int, prompt: list[int]) -> None:
            self._engine.add_request(str(key), {"prompt_token_ids": prompt}, params)

        watches = drive_steps(submit, self._step, prompts, concurrency)
        if concurrency == 1:  # then each delivery is one request's pass
            for watch in watches:
                steps = len(watch.deliveries)
                watch.count(accepted=len(watch.token_ids) - steps, steps=steps)
        return watches

    def close(self) -> None:
        """Nothing outlives the process."""

    def _step(self) -> Iterator[Delivery]:
        for output in self._engine.step():
            yield int(output.request_id), list(output.outputs[0].token_ids), output.finished


if __name__ == "__main__":
    serve(Vllm)
