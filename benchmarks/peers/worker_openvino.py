"""OpenVINO GenAI as a contestant: its continuous batching, stepped here, plain or prompt lookup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
import openvino_genai
from serving import Delivery, Watch, drive_steps, serve, versions

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class OpenVino:
    """One pipeline and the requests that are in it."""

    def __init__(self, options: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GB
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = max(options["max_concurrency"], 1)
        precision = PRECISIONS[options["dtype"]]
        self._properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,  # its own choice would be u8: other numbers
            "INFERENCE_NUM_THREADS": options["threads"],
        }
        self._options = options
        self._has_lookup = options["mode"] == "lookup"
        if self._has_lookup:
            self._properties["prompt_lookup"] = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options["converted"], scheduler, "CPU", self._properties
        )
        self._handles: dict[int, Any] = {}

    def describe(self) -> dict[str, Any]:
        lookup = {name: self._options[name] for name in ("draft", "ngram")}
        return {
            "dtype": self._options["dtype"],
            "versions": versions("openvino-genai", "openvino"),
            "settings": self._properties | (lookup if self._has_lookup else {}),
        }

    def answer(self, prompts: list[list[int]], concurrency: int, max_tokens: int) -> list[Watch]:
        config = self._config(max_tokens)

        def submit(key: int, prompt: list[int]) -> None:
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            self._handles[key] = self._pipeline.add_request(key, ids, config)

        watches = drive_steps(submit, self._step, prompts, concurrency)
        if concurrency == 1:  # then each step is one request's pass
            for watch in watches:
                steps = len(watch.deliveries)
                watch.count(accepted=len(watch.token_ids) - steps, steps=steps)
        return watches

    def close(self) -> None:
        """Nothing outlives the process."""

    def _config(self, max_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.eos_token_id = self._options["eos_ids"][0]
        config.stop_token_ids = set(self._options["eos_ids"])
        if self._has_lookup:
            config.num_assistant_tokens = self._options["draft"]
            config.max_ngram_size = self._options["ngram"]
        return config

    def _step(self) -> Iterator[Delivery]:
        self._pipeline.step()
        for key, handle in list(self._handles.items()):
            token_ids: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    token_ids += output.generated_ids
            is_last = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            if is_last:
                del self._handles[key]
            if token_ids or is_last:
                yield key, token_ids, is_last


if __name__ == "__main__":
    serve(OpenVino)
