"""A tiny chat model whose random text is plain letters, so that some of it passes for prompts."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from reference import tiny_engine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from forerun import Engine

LETTERS = string.ascii_letters + string.digits + ".,?!:;'\"()[]{}<>|`#&-/+*=_"


def plain_tokenizer() -> Tokenizer:
    """Train a tokenizer that knows no bytes beyond plain letters, and many sentence ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [f"{word}. {word}? the {word} and {word}\n" for word in ("fox", "dog", "sun", "tree")]
    trainer = trainers.BpeTrainer(
        vocab_size=160, show_progress=False, initial_alphabet=sorted({*LETTERS, "\u0120", "\u010a"})
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    return tokenizer


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny chat model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_engine, "train_tokenizer", plain_tokenizer)
        return tiny_engine.save_tiny_model(
            tmp_path_factory.mktemp("chatty") / "model", spread=0.12, head_size=32
        )


@pytest.fixture(scope="session")
def plain(chatty: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without its chat template."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    folder.mkdir()
    for file in chatty.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


def open_tiny(folder: Path) -> Engine:
    return Engine.from_pretrained(
        str(folder), drafter="none", dtype="float32", num_threads=1, max_model_len=512,
        max_num_seqs=16, max_num_batched_tokens=512, kv_cache_tokens=8192,
    )  # fmt: skip


@pytest.fixture(scope="session")
def engine(chatty: Path):
    with open_tiny(chatty) as opened:
        yield opened


@pytest.fixture(scope="session")
def plain_engine(plain: Path):
    with open_tiny(plain) as opened:
        yield opened
