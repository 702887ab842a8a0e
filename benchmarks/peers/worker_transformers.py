"""transformers as a contestant: generate(), plain or with prompt lookup, one request at a time."""

from __future__ import annotations

from typing import Any

import torch
from serving import Watch, serve, versions
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class Deliveries(BaseStreamer):
    """Passes on what generate() streams; its first piece is the prompt."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._saw_prompt:
            self._watch.take(value.reshape(-1).tolist())
        self._saw_prompt = True

    def end(self) -> None:
        """Nothing is left to pass on."""


class Transformers:
    """One model; its forward passes are counted, since generate() does not tell of drafts."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        dtype = getattr(torch, options["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype).eval()
        self._model.register_forward_pre_hook(self._see_pass, with_kwargs=True)
        self._passes: list[int] = []  # tokens of each pass
        self._lookup: dict[str, int] = {}
        if options["mode"] == "lookup":
            self._lookup = {
                "prompt_lookup_num_tokens": options["draft"],
                "max_matching_ngram_size": options["ngram"],
            }

    def describe(self) -> dict[str, Any]:
        return {
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "versions": versions("transformers", "torch"),
            "settings": {"threads": torch.get_num_threads(), **self._lookup},
        }

    def answer(self, prompts: list[list[int]], concurrency: int, max_tokens: int) -> list[Watch]:
        assert concurrency == 1, "generate() answers one request at a time"
        return [self._answer_one(prompt, max_tokens) for prompt in prompts]

    def close(self) -> None:
        """Nothing outlives the process."""

    def _answer_one(self, prompt: list[int], max_tokens: int) -> Watch:
        self._passes = []
        watch = Watch()
        inputs = torch.tensor([prompt])
        self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_tokens,
            do_sample=False,
            streamer=Deliveries(watch),
            **self._lookup,
        )
        steps = len(self._passes)
        # each pass gives one token of the target's own; the rest of its tokens were drafts
        drafted = sum(self._passes) - len(prompt) - (steps - 1)
        watch.count(drafted=drafted, accepted=len(watch.token_ids) - steps, steps=steps)
        return watch

    def _see_pass(self, _module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        token_ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self._passes.append(token_ids.shape[-1])


if __name__ == "__main__":
    serve(Transformers)
