"""From a prompt's tokens and what was asked to a request: everything checked, nothing started."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Sequence

from ..constraint import Constraint
from ..errors import ContextTooLong, EmptyPrompt, InvalidParameter, InvalidToken
from ..grammar.compiler import GrammarCompiler
from ..grammar.state import GrammarState
from ..params import SamplingParams
from ..sampling import TokenCounts, TokenRules, derive_seed
from ..text import IncrementalDetokenizer, TextCodec
from .request import Request

__all__ = ["Intake"]


class Intake:
    """Makes requests that fit one model and context."""

    def __init__(
        self,
        codec: TextCodec,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_model_len: int,
    ) -> None:
        self._codec = codec
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_model_len = max_model_len
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()

    def make(
        self,
        request_id: int,
        tokens: Sequence[int],
        params: SamplingParams,
        sample_index: int = 0,
        echo: str = "",
    ) -> Request:
        """Make the request for one of a prompt's `params.n` samples.

        Raises:
            EmptyPrompt, ContextTooLong: what is wrong with the prompt.
            InvalidToken: an option names a token that the vocabulary does not have.
            InvalidParameter: an option cannot mean anything for this model.
            InvalidConstraint, DependencyMissing: what the output must look like cannot be enforced.
        """
        self._check_length(tokens, params)
        self._check_ids(params)
        room = self._max_model_len - len(tokens)
        own_stops = () if params.ignore_eos else self._eos_token_ids
        stop_ids = frozenset([*own_stops, *params.stop_token_ids])
        rules = self._rules(params, stop_ids)
        if rules.min_tokens > room:
            raise InvalidParameter(
                f"min_tokens={params.min_tokens} does not fit: the prompt has {len(tokens)} tokens "
                f"and the context is {self._max_model_len}"
            )
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return Request(
            request_id=request_id,
            tokens=list(tokens),
            num_prompt=len(tokens),
            params=params,
            seed=derive_seed(seed, sample_index) if params.seed is not None else seed,
            stop_ids=stop_ids,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            detokenizer=IncrementalDetokenizer(
                self._codec,
                stop_strings=params.stop_strings,
                min_tokens=params.min_tokens,
                skip_special=params.skip_special_tokens,
                prompt_tail=tokens,
            ),
            arrival_s=time.perf_counter(),
            rules=rules,
            counts=_counts(rules, tokens),
            sample_index=sample_index,
            echo=echo,
            grammar=None if params.constraint is None else self._grammar(params.constraint),
        )

    def close(self) -> None:
        """End the processes that try grammars out."""
        with self._compiler_lock:
            if self._compiler is not None:
                self._compiler.close()

    def check_token(self, token: int, what: str) -> None:
        """Raise `InvalidToken` unless the vocabulary has the token."""
        if not 0 <= token < self._vocab_size:
            raise InvalidToken(
                f"{what} {token} is outside the vocabulary (0 to {self._vocab_size - 1})"
            )

    def _grammar(self, constraint: Constraint) -> GrammarState:
        """Compile what an output must look like, for one request."""
        with self._compiler_lock:
            if self._compiler is None:  # made when first needed: it goes through the vocabulary
                self._compiler = GrammarCompiler(self._codec, self._vocab_size, self._eos_token_ids)
        return self._compiler.compile(constraint).start()

    def _check_length(self, tokens: Sequence[int], params: SamplingParams) -> None:
        if not tokens:
            raise EmptyPrompt("the prompt has no tokens; give it at least one character")
        own = 0 if params.max_tokens == 0 else 1
        if len(tokens) + own > self._max_model_len:
            raise ContextTooLong(
                f"the prompt has {len(tokens)} tokens and the context is {self._max_model_len}, of "
                "which at least one is for the answer; shorten it or raise max_model_len"
            )

    def _check_ids(self, params: SamplingParams) -> None:
        named: list[tuple[str, Iterable[int]]] = [
            ("stop_token_ids: token id", params.stop_token_ids),
            ("banned_token_ids: token id", params.banned_token_ids),
            ("allowed_token_ids: token id", params.allowed_token_ids or ()),
            ("logit_bias: token id", [token for token, _ in params.bias_pairs]),
        ]
        for what, ids in named:
            for token in ids:
                self.check_token(token, what)

    def _rules(self, params: SamplingParams, stop_ids: frozenset[int]) -> TokenRules:
        words = self._encode_words(params.bad_word_strings)
        single = [word[0] for word in words if len(word) == 1]
        return TokenRules(
            bias_ids=tuple(token for token, _ in params.bias_pairs),
            biases=tuple(bias for _, bias in params.bias_pairs),
            allowed=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
            banned=(*params.banned_token_ids, *single),
            bad_words=tuple(word for word in words if len(word) > 1),
            stop_ids=tuple(sorted(stop_ids)),
            min_tokens=params.min_tokens,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
        )

    def _encode_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Encode each word as it stands at the start of a text and after a space."""
        encoded: dict[tuple[int, ...], None] = {}
        for word in words:
            # A word of spaces alone has nothing to strip them from.
            for text in (word, " " + (word.lstrip() or word)):
                tokens = tuple(self._codec.encode(text, add_special=False))
                if tokens:
                    encoded[tokens] = None
        return list(encoded)


def _counts(rules: TokenRules, prompt: Sequence[int]) -> TokenCounts | None:
    if not rules.penalises:
        return None
    return TokenCounts(prompt, with_prompt=rules.repetition != 1)
