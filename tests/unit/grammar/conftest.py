"""Compilers for small tokenizers, and the slow ways to what the fast ones say."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llguidance")

from forerun.grammar import GrammarCompiler, GrammarLimits
from forerun.text import TextCodec

# The tokenizers of the text tests.
_path = Path(__file__).parent.parent / "text" / "conftest.py"
_spec = importlib.util.spec_from_file_location("text_fixtures", _path)
assert _spec is not None
assert _spec.loader is not None
_text = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_text)
byte_level, byte_fallback, smollm2 = _text.byte_level, _text.byte_fallback, _text.smollm2

PADDING = 37  # ids of the logits that no token has


def make_compiler(codec: TextCodec, limits: GrammarLimits | None = None) -> GrammarCompiler:
    """Two end-of-text tokens, and padded logits."""
    return GrammarCompiler(codec, codec.vocab_size + PADDING, [codec.eos_id, codec.bos_id], limits)


@pytest.fixture(scope="session")
def compiler(byte_level: TextCodec) -> Iterator[GrammarCompiler]:
    compiler = make_compiler(byte_level)
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def fallback_compiler(byte_fallback: TextCodec) -> Iterator[GrammarCompiler]:
    compiler = make_compiler(byte_fallback)
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def real_compiler(smollm2: TextCodec) -> Iterator[GrammarCompiler]:
    compiler = make_compiler(smollm2)
    yield compiler
    compiler.close()


def allowed(state, draft=()) -> list[set[int]]:
    """The rows of `masks` as sets of ids."""
    from forerun.grammar import unpack_masks

    vocab_size = state._kinds.vocab_size
    rows = unpack_masks(state.masks(list(draft)), vocab_size)
    assert rows.shape == (len(draft) + 1, vocab_size)
    return [set(np.flatnonzero(row).tolist()) for row in rows]
