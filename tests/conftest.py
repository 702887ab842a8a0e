"""Shared by all tests: tiny real models on disk, and prompts for them."""

from __future__ import annotations

import pytest
from reference.tiny import Tiny, make_tiny


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
