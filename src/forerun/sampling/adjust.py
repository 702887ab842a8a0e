"""Adjustments: what a request's options say about single token ids, before any filter.

Allowed and banned tokens, bad words and min_tokens; logit bias; repetition, frequency and presence
penalty, in this order (vLLM's). They depend on the tokens so far, so each draft position gets the
adjustments of the history that it would have had: the request's own tokens and the drafts before
it. The same functions serve target and draft.

Everything is gathered as flat lists of (row, token) pairs, since options touch few tokens of a
vocabulary; a batch in which nobody asks for any of it pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Adjustments",
    "History",
    "TokenCounts",
    "TokenRules",
    "adjust_logits",
    "collect_adjustments",
]

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What one request asks of single tokens, complete at birth."""

    bias_ids: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    allowed: tuple[int, ...] | None = None  # None: all
    banned: tuple[int, ...] = ()  # bad words of one token among them
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token is banned after the ones before it
    stop_ids: tuple[int, ...] = ()  # banned until there are min_tokens
    min_tokens: int = 0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0

    @property
    def penalises(self) -> bool:
        return bool(self.presence or self.frequency) or self.repetition != 1

    @property
    def is_empty(self) -> bool:
        """Whether logits stay as they are."""
        touched = self.bias_ids or self.banned or self.bad_words or self.allowed is not None
        return not (touched or self.penalises or (self.min_tokens and self.stop_ids))


class TokenCounts:
    """How often each token stands in a request's output, and whether in its prompt.

    Kept for requests with penalties only. A token costs O(1); reading copies nothing.
    """

    def __init__(self, prompt: Sequence[int], *, with_prompt: bool) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.int64)
        if with_prompt:
            for token in prompt:
                self._place(token)

    def append(self, tokens: Sequence[int]) -> None:
        """Count output tokens."""
        for token in tokens:
            self._counts[self._place(token)] += 1

    @property
    def ids(self) -> Ids:
        """The different tokens met so far, [U]."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Ids:
        """How often each of `ids` stands in the output, [U]; 0: only in the prompt."""
        return self._counts[: len(self._places)]

    def find(self, token: int) -> int | None:
        """Say where in `ids` a token is."""
        return self._places.get(token)

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        return place


@dataclass(frozen=True, slots=True)
class History:
    """One request as its adjustments see it."""

    rules: TokenRules
    counts: TokenCounts | None  # of the committed output; None: no penalties
    tokens: Sequence[int]  # prompt and committed output
    num_output: int
    draft: Sequence[int]  # it owns len(draft) + 1 rows; row i comes after i draft tokens


@dataclass(frozen=True, slots=True)
class Adjustments:
    """A batch's adjustments as flat pairs; no pair stands twice in a kind, but for bans."""

    limited_rows: Tensor  # [L] int64, rows with an allow-list
    allowed_rows: Tensor  # [a] int64, as indices into limited_rows
    allowed_ids: Tensor  # [a]
    banned_rows: Tensor  # [x]
    banned_ids: Tensor  # [x]
    bias_rows: Tensor  # [b]
    bias_ids: Tensor  # [b]
    biases: Tensor  # [b] float32
    seen_rows: Tensor  # [s], tokens that prompt, output or earlier drafts hold
    seen_ids: Tensor  # [s]
    counts: Tensor  # [s] float32, in output and earlier drafts
    presence: Tensor  # [s] float32, the request's penalty, for each of its tokens; so the next two
    frequency: Tensor  # [s]
    repetition: Tensor  # [s]
    rows: Tensor  # [r] int64, all rows that are touched


def adjust_logits(logits: Tensor, adjustments: Adjustments) -> Tensor:  # [M, V] float32, changed
    """Apply a batch's adjustments in place, and hand the same logits back."""
    a = adjustments
    if len(a.limited_rows):
        kept = torch.full((len(a.limited_rows), logits.shape[1]), -torch.inf, device=logits.device)
        kept[a.allowed_rows, a.allowed_ids] = logits[a.limited_rows[a.allowed_rows], a.allowed_ids]
        logits[a.limited_rows] = kept
    logits[a.banned_rows, a.banned_ids] = -torch.inf
    logits[a.bias_rows, a.bias_ids] += a.biases
    if len(a.seen_rows):
        seen = logits[a.seen_rows, a.seen_ids]  # [s]
        seen = torch.where(seen > 0, seen / a.repetition, seen * a.repetition)
        seen = seen - a.frequency * a.counts - a.presence * (a.counts > 0)
        logits[a.seen_rows, a.seen_ids] = seen
    return logits


def collect_adjustments(
    histories: Sequence[History], device: torch.device | str = "cpu"
) -> Adjustments | None:
    """Gather the adjustments of a batch's rows, in the order of its requests; None: there are none.

    Example: after output [7], a frequency penalty and the draft [7, 9] give row 0 the pair (7: 1),
    row 1 (7: 2), row 2 (7: 2) and (9: 1).
    """
    if all(each.rules.is_empty for each in histories):
        return None
    parts = _Parts()
    first = 0
    for each in histories:
        if not each.rules.is_empty:
            parts.add(each, first)
        first += len(each.draft) + 1
    return parts.pack(device)


class _Parts:
    """Lists of arrays on their way to becoming flat tensors."""

    def __init__(self) -> None:
        self._num_limited = 0
        self._parts: dict[str, list[NDArray[np.generic]]] = {}

    def add(self, history: History, first: int) -> None:
        rules, num_rows = history.rules, len(history.draft) + 1
        rows = np.arange(first, first + num_rows)
        self._put("rows", rows)
        if rules.allowed is not None:
            self._put("limited_rows", rows)
            own = np.arange(self._num_limited, self._num_limited + num_rows)
            self._put_pairs("allowed", own, np.asarray(sorted(set(rules.allowed)), np.int64))
            self._num_limited += num_rows
        banned = np.asarray(sorted({*rules.banned}), np.int64)
        self._put_pairs("banned", rows, banned)
        num_short = min(num_rows, max(0, rules.min_tokens - history.num_output))
        self._put_pairs("banned", rows[:num_short], np.asarray(rules.stop_ids, np.int64))
        self._ban_words(history, first)
        self._put_pairs("bias", rows, np.asarray(rules.bias_ids, np.int64))
        self._put("biases", np.tile(np.asarray(rules.biases, np.float32), num_rows))
        if history.counts is not None:
            self._penalise(history, history.counts, rows)

    def _ban_words(self, history: History, first: int) -> None:
        words = history.rules.bad_words
        if not words:
            return
        reach = max(len(word) for word in words) - 1
        output = history.tokens[max(0, len(history.tokens) - reach) :]
        whole = [*output, *history.draft]
        for row in range(len(history.draft) + 1):
            before = whole[: len(output) + row]
            ends = {word[-1] for word in words if tuple(before[1 - len(word) :]) == word[:-1]}
            self._put_pairs("banned", np.asarray([first + row]), np.asarray([*ends], np.int64))

    def _penalise(self, history: History, known: TokenCounts, rows: Ids) -> None:
        fresh = [token for token in dict.fromkeys(history.draft) if known.find(token) is None]
        ids = np.concatenate([known.ids, np.asarray(fresh, np.int64)])  # [U]
        counts = np.zeros((len(rows), len(ids)), np.float32)  # [R, U]
        counts[:, : len(known.ids)] = known.counts
        seen = np.zeros_like(counts, dtype=bool)
        seen[:, : len(known.ids)] = True
        for row, token in enumerate(history.draft, start=1):
            column = known.find(token)
            if column is None:
                column = len(known.ids) + fresh.index(token)
            counts[row:, column] += 1
            seen[row:, column] = True
        at, place = seen.nonzero()
        self._put("seen_rows", rows[at])
        self._put("seen_ids", ids[place])
        self._put("counts", counts[at, place])
        rules = history.rules
        for name in ("presence", "frequency", "repetition"):
            self._put(name, np.full(len(at), getattr(rules, name), np.float32))

    def _put_pairs(self, kind: str, rows: Ids, ids: Ids) -> None:
        self._put(f"{kind}_rows", np.repeat(rows, len(ids)))
        self._put(f"{kind}_ids", np.tile(ids, len(rows)))

    def _put(self, name: str, values: NDArray[np.generic]) -> None:
        self._parts.setdefault(name, []).append(values)

    def pack(self, device: torch.device | str) -> Adjustments:
        floats = ("biases", "counts", "presence", "frequency", "repetition")

        def tensor(name: str) -> Tensor:
            kind = np.float32 if name in floats else np.int64
            values = np.concatenate([np.empty(0, kind), *self._parts.get(name, [])])
            return torch.from_numpy(values.astype(kind)).to(device)

        return Adjustments(**{name: tensor(name) for name in Adjustments.__dataclass_fields__})
