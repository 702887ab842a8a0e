"""Tokenizers built from metadata: pieces, special tokens, round trips, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from forerun.errors import ModelFileError, UnsupportedModel
from forerun.model.gguf_tokenizer import read_tokenizer, sentencepiece_merges

ALPHABET = sorted(ByteLevel.alphabet())
TEXTS = [
    "def f(x):\n\treturn  x ** 2  # 12345\n",
    "héllo 🌍🚀 你好世界 こんにちは",
    "   \n\n\t  a  b   ",
    "½ ² 3.14159 I'll don't WE'RE",
    "<|a|>user\nHi<|b|>\n",
]


class FakeFile(SimpleNamespace):
    """The metadata of a file without a file."""

    path = Path("fake.gguf")

    def get(self, key: str, default: Any = None, kind: Any = None) -> Any:
        return self.keys.get(key, default)

    def require(self, key: str, kind: Any) -> Any:
        if key not in self.keys:
            raise ModelFileError(f"{key} is missing")
        return self.keys[key]


def byte_level(pre: str, merges: tuple[str, ...] = (), **more: Any) -> Any:
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = ["<|a|>", "<|b|>", *ALPHABET, *merged, "<tool>"]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 3) + [4],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return FakeFile(keys={**keys, **{f"tokenizer.{key}": value for key, value in more.items()}})


def sentencepiece(**more: Any) -> Any:
    pieces = {"▁": -9.0, "h": -8.0, "i": -7.0, "hi": -1.0, "▁h": -2.0, "▁hi": -3.0, "e": -5.0}
    specials = ["<unk>", "<s>", "</s>"]
    single = [f"<0x{value:02X}>" for value in range(256)]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*specials, *single, *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return FakeFile(keys={**keys, **{f"tokenizer.{key}": value for key, value in more.items()}})


def pieces_of(pre: str, text: str) -> list[str]:
    tokenizer = read_tokenizer(byte_level(pre)).tokenizer
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def test_each_kind_cuts_text_its_own_way():
    assert pieces_of("smollm", "a 123") == ["a", "Ġ", "1", "2", "3"]
    assert pieces_of("gpt-2", "a 1234") == ["a", "Ġ1234"]
    assert pieces_of("llama-bpe", "a 1234 (b") == ["a", "Ġ", "123", "4", "Ġ(", "b"]
    assert pieces_of("qwen2", "a 12") == ["a", "Ġ", "1", "2"]
    assert pieces_of("llama-bpe", "I'LL") == ["I", "'LL"]
    assert pieces_of("gpt-2", "I'LL") == ["I", "'", "LL"]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_round_trips(pre, text):
    tokenizer = read_tokenizer(byte_level(pre, ("Ġ a", "1 2", "u s"))).tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_keep_their_ids_and_flags():
    spec = read_tokenizer(byte_level("smollm"))
    tokenizer = spec.tokenizer
    last = tokenizer.get_vocab_size() - 1
    encoded = tokenizer.encode("<|a|>u<tool><|b|>", add_special_tokens=False)
    assert encoded.tokens == ["<|a|>", "u", "<tool>", "<|b|>"]
    assert encoded.ids == [0, 2 + ALPHABET.index("u"), last, 1]
    assert tokenizer.decode(encoded.ids) == "u<tool>"
    assert (spec.bos_token, spec.eos_token) == ("<|a|>", "<|b|>")


def test_whether_bos_is_added():
    assert not read_tokenizer(byte_level("smollm")).add_bos
    assert read_tokenizer(byte_level("llama-bpe")).add_bos
    assert not read_tokenizer(byte_level("llama-bpe", **{"ggml.add_bos_token": False})).add_bos
    assert read_tokenizer(sentencepiece()).add_bos
    assert read_tokenizer(byte_level("smollm", chat_template="T")).chat_template == "T"


def test_llama3_takes_whole_pieces_without_merges():
    # "abc" is a token that no merge of "a b" alone can build.
    file = byte_level("llama-bpe", ("a b", "ab c"))
    file.keys["tokenizer.ggml.merges"] = ["a b"]
    assert read_tokenizer(file).tokenizer.encode("abc").tokens == ["abc"]
    file.keys["tokenizer.ggml.pre"] = "gpt-2"
    assert read_tokenizer(file).tokenizer.encode("abc").tokens == ["ab", "c"]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes():
    spec = read_tokenizer(sentencepiece())
    tokenizer = spec.tokenizer
    # "hi" scores best, so it is built first; then the space joins it.
    assert tokenizer.encode("hi hi").tokens == ["▁hi", "▁hi"]
    encoded = tokenizer.encode("hé", add_special_tokens=False)
    assert encoded.tokens == ["▁h", "<0xC3>", "<0xA9>"]
    for text in ["hi", "hi é 🌍 你", " hi", "h  i\n"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    bare = read_tokenizer(sentencepiece(**{"ggml.add_space_prefix": False})).tokenizer
    assert bare.encode("hi").tokens == ["hi"]
    assert tokenizer.encode("<s>hi").ids[0] == 1


def test_merge_order_is_that_of_transformers():
    from transformers.tokenization_utils_base import generate_merges

    scores = {"a": -5.0, "b": -6.0, "ab": -1.0, "ba": -2.0, "aba": -2.0, "abab": -3.0, "bab": -2.0}
    vocab = {piece: index for index, piece in enumerate(scores)}
    assert sentencepiece_merges(scores, vocab) == generate_merges(vocab, scores)


@pytest.mark.parametrize(
    ("file", "error", "said"),
    [
        (byte_level("tekken"), UnsupportedModel, "'tekken'; supported: gpt-2"),
        (byte_level("smollm", **{"ggml.model": "bert"}), UnsupportedModel, "'bert'"),
        (byte_level("smollm", **{"ggml.merges": ["ab"]}), ModelFileError, "merge 'ab'"),
        (byte_level("smollm", **{"ggml.merges": ["a ZZZ"]}), ModelFileError, "cannot be built"),
        (byte_level("smollm", **{"ggml.token_type": [1]}), ModelFileError, "1 token types"),
        (byte_level("smollm", **{"ggml.tokens": ["a"] * 259}), ModelFileError, "occur twice"),
        (byte_level("smollm", **{"ggml.eos_token_id": 9999}), ModelFileError, "=9999"),
        (sentencepiece(**{"ggml.scores": [0.0]}), ModelFileError, "1 scores"),
    ],
)
def test_broken_metadata_is_refused(file, error, said):
    with pytest.raises(error) as caught:
        read_tokenizer(file)
    assert said in str(caught.value)
