"""A tiny real model on disk with its slow twin: what most engine tests run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from reference.plain import PlainLlama, generate
from reference.tiny_engine import save_tiny_model

from forerun.engine.setup import make_codec
from forerun.model.loader import open_model
from forerun.params import SamplingParams


@dataclass
class Tiny:
    """A tiny model: its folder, its codec, and what plain decoding makes of a prompt."""

    folder: Path
    codec: object
    model: object
    _known: dict[object, object] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def plain(self, prompt: Sequence[int], params: SamplingParams, **options):
        """Generate with the slow twin; remembered, since many tests ask for the same."""
        key = (tuple(prompt), repr(params), repr(sorted(options.items())))
        if key not in self._known:
            eos = self.model.config["eos_token_id"]
            self._known[key] = generate(
                self.model, self.codec, prompt, params, **{"eos": eos} | options
            )
        return self._known[key]

    def answers(self, prompts, params, **options) -> list[list[int]]:
        """Prompts with their plain outputs: what an oracle knows."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return [
            [*prompt, *self.plain(prompt, own, **options).token_ids]
            for prompt, own in zip(prompts, each, strict=True)
        ]


def make_tiny(folder: Path, **options) -> Tiny:
    torch.set_num_threads(1)  # tiny matrices: a second thread only waits
    save_tiny_model(folder, **options)
    return Tiny(folder, make_codec(open_model(folder)), PlainLlama(folder))
