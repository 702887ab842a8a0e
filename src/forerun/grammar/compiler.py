"""Constraints compiled, each once: tried in a process apart, then kept under a bound of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

from ..constraint import Constraint
from ..errors import InvalidConstraint
from ..text import TextCodec
from ..text.vocabulary import token_bytes
from .limits import GrammarLimits
from .matching import error_of, make_matcher, make_tokenizer, require_library
from .source import to_lark
from .state import Grammar, TokenKinds
from .trials import Trials, VocabularyData

__all__ = ["GrammarCompiler"]

# A compiled grammar's memory beyond what its trial took: it grows a little as it is used.
BASE_BYTES = 64 * 1024
BYTES_PER_CHARACTER = 24
_WAYS_OUT = {
    "json": "correct or simplify the schema",
    "regex": "correct or simplify the pattern (no look-around, no back-references)",
    "choice": "correct the choices",
    "grammar": "correct or simplify the grammar",
}


class GrammarCompiler:
    """Compile constraints for one model; thread-safe.

    Raises:
        DependencyMissing: the compiler library is not installed.
    """

    def __init__(
        self,
        codec: TextCodec,
        vocab_size: int,  # of the logits, which may be padded beyond the tokenizer's
        eos_token_ids: Sequence[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        require_library()
        codec.encode_plain("")  # prepared here, not in somebody's step
        self._limits = limits or GrammarLimits()
        tokens = token_bytes(codec, vocab_size)
        eos_ids = [each for each in dict.fromkeys(eos_token_ids) if 0 <= each < vocab_size]
        if not eos_ids:  # the library wants one; see TokenKinds
            eos_ids = [len(tokens)]
            tokens.append(b"<end of text>")
        special = sorted({*codec.special_ids, *eos_ids} & set(range(len(tokens))))
        self._tokenizer = make_tokenizer(tokens, special, eos_ids)
        self._kinds = TokenKinds(tokens, eos_ids, vocab_size, codec.encode_plain)
        self._trials = Trials(VocabularyData(tokens, special, eos_ids), self._limits)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Constraint, tuple[Grammar, int]] = OrderedDict()  # oldest first
        self._kept_bytes = 0
        self._under_way: dict[Constraint, Future[Grammar]] = {}

    @property
    def num_kept(self) -> int:
        """Count the compiled constraints that are kept."""
        return len(self._kept)

    @property
    def kept_bytes(self) -> int:
        """Estimate what they take."""
        return self._kept_bytes

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint, or take it from those that are kept.

        Raises:
            InvalidConstraint: it is wrong, too big, unsatisfiable, or takes too long.
            Overloaded: others are being compiled, and there was no end of it.
        """
        with self._lock:
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
                return self._kept[constraint][0]
            waiting = self._under_way.get(constraint)
            if waiting is None:
                own = self._under_way[constraint] = Future()
        if waiting is not None:
            return waiting.result()  # whoever compiles it has a time limit
        try:
            grammar, size = self._build(constraint)
        except BaseException as error:
            with self._lock:
                del self._under_way[constraint]
            own.set_exception(error)
            raise
        with self._lock:
            del self._under_way[constraint]
            self._keep(constraint, grammar, size)
        own.set_result(grammar)
        return grammar

    def close(self) -> None:
        """End the worker processes; a later `compile` starts new ones."""
        self._trials.close()

    def _build(self, constraint: Constraint) -> tuple[Grammar, int]:
        lark = to_lark(constraint, self._limits)
        try:
            size = self._trials.run(lark)
            # The same again, here: it ended in time, without a fault, on a smaller stack.
            matcher = make_matcher(self._tokenizer, lark)
            error = error_of(matcher)
            if error is not None:
                raise InvalidConstraint(error)
        except InvalidConstraint as error:
            raise InvalidConstraint(
                f"the {constraint.kind} constraint cannot be used: {error}; "
                f"{_WAYS_OUT[constraint.kind]}"
            ) from error
        size = max(size, BYTES_PER_CHARACTER * len(lark)) + BASE_BYTES
        return Grammar(matcher, self._kinds), size

    def _keep(self, constraint: Constraint, grammar: Grammar, size: int) -> None:
        self._kept[constraint] = grammar, size
        self._kept_bytes += size
        while self._kept_bytes > self._limits.cache_bytes:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._kept_bytes -= dropped
