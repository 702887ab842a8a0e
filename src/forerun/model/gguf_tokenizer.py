"""A tokenizer from the metadata of a `.gguf` file, as its publisher's `tokenizer.json` has it.

Two kinds: byte-level BPE ("gpt2") and SentencePiece BPE with byte fallback ("llama").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from ..errors import ModelFileError, UnsupportedModel
from .gguf import GgufFile
from .tokenizer import TokenizerSpec

__all__ = ["read_tokenizer", "sentencepiece_merges"]

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # kinds of token, as llama.cpp numbers them

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreKind:
    """How one family cuts text before BPE merges inside the pieces."""

    split: str | None = None  # a regular expression; None: GPT-2's
    single_digits: bool = False  # every digit is a piece
    compose: bool = False  # Unicode NFC first
    ignore_merges: bool = False  # a whole piece in the vocabulary needs no merges
    add_bos: bool = False  # where the file says nothing


_GPT2 = _PreKind()
_DIGITS = _PreKind(single_digits=True)
_LLAMA3 = _PreKind(split=_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_QWEN2 = _PreKind(split=_QWEN2_SPLIT, compose=True)
# tokenizer.ggml.pre -> kind
_PRE_KINDS = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def read_tokenizer(file: GgufFile) -> TokenizerSpec:
    """Build the tokenizer that a file describes.

    Raises:
        UnsupportedModel: another kind of tokenizer, or an unknown way of cutting text.
        ModelFileError: the metadata is incomplete or contradicts itself.
    """
    model = file.require("tokenizer.ggml.model", str)
    tokens: list[str] = file.require("tokenizer.ggml.tokens", list)
    kinds: list[int] = file.get("tokenizer.ggml.token_type", kind=list) or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelFileError(f"{file.path}: {len(kinds)} token types for {len(tokens)} tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelFileError(f"{file.path}: {len(tokens) - len(vocab)} tokens occur twice")
    if model == "gpt2":
        kind = _pre_kind(file)
        tokenizer, add_bos = _byte_level(file, vocab, kind), kind.add_bos
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(file, vocab, kinds), True
    else:
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.model={model!r}; supported: gpt2, llama"
        )
    _add_special(tokenizer, tokens, kinds)
    bos = _token(file, tokens, "bos")
    return TokenizerSpec(
        tokenizer=tokenizer,
        chat_template=file.get("tokenizer.chat_template", kind=str),
        bos_token=bos,
        eos_token=_token(file, tokens, "eos"),
        add_bos=bool(file.get("tokenizer.ggml.add_bos_token", add_bos)) and bos is not None,
        pad_token=_token(file, tokens, "padding"),
    )


def _pre_kind(file: GgufFile) -> _PreKind:
    name = file.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_KINDS:
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.pre={name!r}; supported: {', '.join(_PRE_KINDS)}"
        )
    return _PRE_KINDS[name]


def _byte_level(file: GgufFile, vocab: dict[str, int], kind: _PreKind) -> Tokenizer:
    merges = []
    for line in file.require("tokenizer.ggml.merges", list):
        left, separator, right = line.partition(" ")
        if not (left and separator and right):
            raise ModelFileError(f"{file.path}: merge {line!r}; expected two tokens and a space")
        merges.append((left, right))
    bpe = _build_bpe(file, vocab, merges, ignore_merges=kind.ignore_merges)
    tokenizer = Tokenizer(bpe)
    if kind.compose:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if kind.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if kind.split is not None:
        steps.append(pre_tokenizers.Split(Regex(kind.split), "isolated", invert=False))
    steps.append(
        pre_tokenizers.ByteLevel(
            add_prefix_space=bool(file.get("tokenizer.ggml.add_space_prefix", False)),
            use_regex=kind.split is None,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, vocab: dict[str, int], kinds: list[int]) -> Tokenizer:
    scores: list[float] = file.require("tokenizer.ggml.scores", list)
    if len(scores) != len(vocab):
        raise ModelFileError(f"{file.path}: {len(scores)} scores for {len(vocab)} tokens")
    pieces = {
        token: score
        for (token, index), score in zip(vocab.items(), scores, strict=True)
        if kinds[index] in (_NORMAL, _USER_DEFINED)
    }
    unknown_id = file.get("tokenizer.ggml.unknown_token_id", 0)
    unknown = next((token for token, index in vocab.items() if index == unknown_id), None)
    bpe = _build_bpe(
        file,
        vocab,
        sentencepiece_merges(pieces, vocab),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    steps = [normalizers.Prepend("▁"), replace] if prefix else [replace]
    tokenizer.normalizer = normalizers.Sequence(steps)
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        undo.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def sentencepiece_merges(pieces: dict[str, float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Order every way of building a piece from two pieces by the score of the result.

    SentencePiece merges the best-scored pair first, which is what a list of merges says too.
    """
    found = []
    for piece, score in pieces.items():
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in halves if pair[0] in pieces and pair[1] in pieces]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(score, len(left), len(right), (left, right)) for left, right in known]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [pair for *_, pair in found]


def _build_bpe(
    file: GgufFile, vocab: dict[str, int], merges: list[tuple[str, str]], **options: object
) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{file.path}: tokenizer cannot be built: {error}") from error


def _add_special(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    # All are in the vocabulary already, so each keeps the id that the file gives it.
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    tokenizer.add_tokens(added)


def _token(file: GgufFile, tokens: list[str], role: str) -> str | None:
    key = f"tokenizer.ggml.{role}_token_id"
    index = file.get(key, kind=int)
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelFileError(f"{file.path}: {key}={index}; the vocabulary has {len(tokens)}")
    return str(tokens[index])
