from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference.tiny import Tiny
from tokenizers import AddedToken, Tokenizer, decoders, models

from forerun.text import TextCodec
from forerun.text.vocabulary import token_bytes

TEXTS = st.one_of(
    st.text(),
    st.text(alphabet=" \n\t\u2581ab\u00e9\u4f60\U0001f600<0x1A>"),
)


def joined(codec: TextCodec, text: str) -> bytes:
    table = token_bytes(codec, codec.vocab_size)
    return b"".join(table[token_id] for token_id in codec.encode(text, add_special=False))


@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
def test_byte_level_tokens_spell_the_text(byte_level: TextCodec, text: str) -> None:
    assert joined(byte_level, text) == text.encode()


@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
def test_the_tiny_models_tokens_spell_the_text(tiny: Tiny, text: str) -> None:
    assert joined(tiny.codec, text) == text.encode()


@pytest.mark.model
@settings(deadline=None, max_examples=30)
@given(text=TEXTS)
def test_a_real_models_tokens_spell_the_text(smollm2: TextCodec, text: str) -> None:
    # Some control characters are no token of it: the tokenizer drops them.
    assume(smollm2.decode(smollm2.encode_plain(text)) == text)
    assert joined(smollm2, text) == text.encode()


@settings(deadline=None, max_examples=100)
@given(text=TEXTS.filter(lambda text: "\u2581" not in text and "<" not in text))
def test_byte_fallback_tokens_spell_the_text_after_its_first_space(
    byte_fallback: TextCodec, text: str
) -> None:
    spelt = joined(byte_fallback, text)
    assert spelt in (text.encode(), b" " + text.encode())


def test_pieces_bytes_and_special_tokens(byte_fallback: TextCodec) -> None:
    table = token_bytes(byte_fallback, byte_fallback.vocab_size)
    tokens = {byte_fallback.token(each): table[each] for each in range(len(table))}
    assert tokens["<0x0A>"] == b"\n"
    assert tokens["<0xE4>"] == b"\xe4"
    assert tokens["\u2581\u2581"] == b"  "
    assert tokens["\u2581\u00e9"] == " \u00e9".encode()
    assert tokens["</s>"] == b"</s>"


def test_without_byte_fallback_such_tokens_are_text(metaspace: TextCodec) -> None:
    table = token_bytes(metaspace, metaspace.vocab_size)
    newline = next(each for each in range(len(table)) if metaspace.token(each) == "<0x0A>")
    assert table[newline] == b"<0x0A>"


def test_added_tokens_stand_for_their_names(byte_level: TextCodec) -> None:
    table = token_bytes(byte_level, byte_level.vocab_size)
    names = ["<|im_end|>", "<tool>", "<|\u00fc x|>"]
    assert all(name.encode() in table for name in names)


def test_padding_and_gaps_stand_for_nothing(byte_level: TextCodec) -> None:
    size = byte_level.vocab_size
    assert token_bytes(byte_level, size + 7)[size:] == [b""] * 7
    assert len(token_bytes(byte_level, size - 7)) == size - 7


def test_every_byte_is_some_byte_level_token(byte_level: TextCodec) -> None:
    table = token_bytes(byte_level, byte_level.vocab_size)
    assert {bytes([value]) for value in range(256)} <= set(table)


def test_a_plain_vocabulary_is_its_own_text() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "\u00e9": 1, "<unk>": 2}, unk_token="<unk>"))
    codec = TextCodec(tokenizer, bos_token=None, eos_token=None, add_bos=False, chat_template=None)
    assert token_bytes(codec, 3) == [b"a", "\u00e9".encode(), b"<unk>"]


def test_text_that_is_no_byte_level_token_is_taken_as_it_is() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "\u4f60": 1}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("\u4f60\u597d", special=False)])
    codec = TextCodec(tokenizer, bos_token=None, eos_token=None, add_bos=False, chat_template=None)
    assert token_bytes(codec, 3) == [b"a", "\u4f60".encode(), "\u4f60\u597d".encode()]
