"""Shared by all tests: tiny real models on disk, and their slow twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

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
        from reference.plain import generate

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
    from reference.plain import PlainLlama
    from reference.tiny_engine import save_tiny_model

    from forerun.model.loader import open_model
    from forerun.text import TextCodec

    torch.set_num_threads(1)  # tiny matrices: a second thread only waits
    save_tiny_model(folder, **options)
    spec = open_model(folder).tokenizer
    codec = TextCodec(
        spec.tokenizer,
        bos_token=spec.bos_token,
        eos_token=spec.eos_token,
        add_bos=spec.add_bos,
        chat_template=spec.chat_template,
    )
    return Tiny(folder, codec, PlainLlama(folder))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """About 300 tokens, two layers; head size 16, so torch kernels.

    Its attention is strong and its text chaotic: one wrong key or value changes every later token.
    """
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny model whose text repeats itself often, and not always: for n-gram drafts."""
    return make_tiny(tmp_path_factory.mktemp("repeating") / "model", habit=0.7)


@pytest.fixture(scope="session")
def tiny_compiled(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The same with head size 32, which the compiled kernels take."""
    return make_tiny(tmp_path_factory.mktemp("tiny32") / "model", head_size=32)


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A vocabulary of 16 tokens, one layer: for statistics."""
    return make_tiny(
        tmp_path_factory.mktemp("narrow") / "model",
        vocab_size=16, num_layers=1, spread=0.2, max_positions=64, head_size=32, eos=[999],
    )  # fmt: skip


@pytest.fixture(scope="session")
def prompts(tiny: Tiny) -> list[list[int]]:
    """Eight prompts of mixed lengths."""
    texts = [
        "the quick brown fox",
        "a",
        "der Bär läuft über die Straße, der Bär läuft über",
        "one two three one two three one two",
        "你好世界 привет",
        "def add(a, b): return a + b\n" * 3,
        "ab" * 30,
        "Hello, world! " * 6,
    ]
    return [tiny.codec.encode(text) for text in texts]
