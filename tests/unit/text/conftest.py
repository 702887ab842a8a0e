"""Small real tokenizers of the kinds in use: byte-level (GPT), byte-fallback (Llama), words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from forerun.text import TextCodec

LINES = [
    "the quick brown fox jumps over the lazy dog, and the other dogs bark at the fox",
    "der Bär läuft über die Straße; naïve café, señor, 你好世界, привет мир, 你好吗",
    "stop STOP aaab aab User: Assistant: hello world, hello there",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<tool>", AddedToken("<|ü x|>", special=False)])
    return tokenizer


def train_byte_fallback() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=120, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
    )
    tokenizer.train_from_iterator([line for line in LINES if line.isascii()], trainer)
    spec = json.loads(tokenizer.to_str())
    learnt = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    pieces = [*learnt[:3], *byte_tokens, *learnt[3:], "▁▁", "▁é"]  # Llama's order
    spec["model"]["vocab"] = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


@pytest.fixture(scope="session")
def byte_level() -> TextCodec:
    return TextCodec(
        train_byte_level(),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        add_bos=False,
        chat_template=CHATML,
    )


@pytest.fixture(scope="session")
def byte_fallback() -> TextCodec:
    return TextCodec(
        train_byte_fallback(), bos_token="<s>", eos_token="</s>", add_bos=True, chat_template=None
    )


@pytest.fixture(scope="session")
def metaspace() -> TextCodec:
    """A SentencePiece tokenizer without bytes, whose decoder is Metaspace (T5's kind)."""
    tokenizer = train_byte_fallback()
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return TextCodec(
        tokenizer, bos_token="<s>", eos_token="</s>", add_bos=False, chat_template=None
    )


@pytest.fixture(scope="session")
def smollm2() -> TextCodec:
    home = Path(os.environ.get("FORERUN_HOME", Path.home() / ".cache" / "forerun"))
    folder = home / "models" / "smollm2-135m"
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"needs {folder}; run `forerun pull smollm2-135m`")
    return TextCodec(
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        add_bos=False,
        chat_template=CHATML,
    )
