"""The compiler library at arm's length: made here, so that a trial and its sequel are the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import DependencyMissing

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["error_of", "make_matcher", "make_tokenizer", "require_library"]

MAX_MESSAGE = 300  # characters
MAX_LEXER_STATES = 50_000  # one or two kilobytes each, kept for all requests of a grammar
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")


class _Vocabulary:
    """What the library asks of a tokenizer; it never has to cut text with our options."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: Sequence[int], eos_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = list(special_ids)
        self.eos_token_id = eos_id

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("a grammar needs no tokenizer, only what tokens stand for")


def require_library() -> None:
    """Raise `DependencyMissing` unless the compiler is installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise DependencyMissing(
            "structured output needs llguidance; pip install 'forerun[structured]'"
        ) from error


def make_tokenizer(
    tokens: list[bytes], special_ids: Sequence[int], eos_ids: Sequence[int]
) -> LLTokenizer:
    """Build the library's view of a vocabulary: what each id stands for, and which ids end."""
    from llguidance import LLTokenizer

    vocabulary = _Vocabulary(tokens, special_ids, eos_ids[0])
    return LLTokenizer(vocabulary, eos_token=list(eos_ids))  # type: ignore[arg-type]


def make_matcher(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """Compile a grammar; errors are the matcher's state (`error_of`)."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    return LLMatcher(tokenizer, lark, log_level=0, limits=limits)


def error_of(matcher: LLMatcher) -> str | None:
    """Return what went wrong in one bounded line, or None."""
    if not matcher.is_error():
        return None
    return one_line(matcher.get_error().replace("<non-verbose/>", ""))


def one_line(message: str) -> str:
    """Squeeze a message into one line of bounded length, without the place in our own line."""
    # The library quotes the source below its message, line numbers before a bar.
    head = re.split(r"\n\s*\d+ \|", message, maxsplit=1)[0]
    text = " ".join(_PLACE.sub("", head).split())
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."
