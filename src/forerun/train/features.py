"""The target's hidden states over rows of text that are known: whole sequences, several a pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..errors import ConfigError
from ..model.decoder import KEY_BLOCK, Decoder
from ..types import FeatureSpec, ForwardInput
from .feature_store import FeatureStore, RowFeatures, bytes_per_position
from .rows import Row
from .target import Target

__all__ = ["FeatureProgress", "compute_features", "open_features"]

PASS_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class FeatureProgress:
    """How far the features of some rows are. The first one announces the size."""

    num_positions: int  # done, those of earlier runs included
    total_positions: int
    total_bytes: int
    tokens_per_s: float | None  # of this run; None before its first pass


def open_features(folder: Path, target: Target, layers: Sequence[int]) -> FeatureStore:
    """Open the features that lie beside rows: one folder for each choice of layers."""
    name = "-".join(["features", *map(str, layers)]) if layers else "features-final"
    return FeatureStore(
        folder / name,
        fingerprint=target.fingerprint,
        hidden_size=target.config.hidden_size,
        layers=layers,
    )


def compute_features(
    target: Target,
    rows: Sequence[Row],
    store: FeatureStore,
    report: Callable[[FeatureProgress], None] = lambda progress: None,
) -> None:
    """Add the features of rows that the store lacks. A killed run goes on where it was.

    Raises:
        ConfigError: rows hold tokens that the target does not have.
    """
    _check_tokens(rows, target)
    missing = [row for row in rows if row.id not in store]
    total = sum(_length(row) for row in rows)
    per_position = bytes_per_position(target.config.hidden_size, store.layers)
    done = new = total - sum(_length(row) for row in missing)

    def tell(rate: float | None) -> None:
        report(FeatureProgress(done, total, total * per_position, rate))

    tell(None)
    begin_s = time.perf_counter()
    reader = _Reader(target.decoder, store.layers, max(map(_length, missing), default=0))
    for group in _groups(missing):
        store.add([row.id for row in group], reader.read(group))
        done += sum(_length(row) for row in group)
        tell((done - new) / (time.perf_counter() - begin_s))


def _check_tokens(rows: Sequence[Row], target: Target) -> None:
    most = target.config.vocab_size
    for row in rows:
        largest = max(_tokens(row), default=0)
        if largest >= most:
            raise ConfigError(
                f"row {row.id} holds token {largest}, {target.name} has {most}: the rows are "
                "another model's; make rows with the model that the head is for"
            )


def _length(row: Row) -> int:
    return len(row.prompt_ids) + len(row.answer_ids)


def _groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Take rows together until a pass is full; a longer row goes alone."""
    group: list[Row] = []
    for row in rows:
        if group and sum(map(_length, group)) + _length(row) > PASS_TOKENS:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


class _Reader:
    """A decoder and a cache for one pass."""

    def __init__(self, decoder: Decoder, layers: Sequence[int], longest: int) -> None:
        self._decoder = decoder
        self._wanted = FeatureSpec(tuple(layers), final=True)
        # Every row of a group begins a block of its own.
        num_blocks = 2 * max(PASS_TOKENS, longest) // KEY_BLOCK + PASS_TOKENS
        self._cache = KVCache(decoder.cache_shape(KEY_BLOCK), num_blocks, decoder.device)

    def read(self, rows: Sequence[Row]) -> list[RowFeatures]:
        if len(rows) > 1 or _length(rows[0]) <= PASS_TOKENS:
            return self._run([_tokens(row) for row in rows], [len(row.prompt_ids) for row in rows])
        return [self._read_long(rows[0])]

    def _read_long(self, row: Row) -> RowFeatures:
        """Read a row in pieces, each on top of the cache of those before."""
        tokens = _tokens(row)
        parts = [
            part
            for first in range(0, len(tokens), PASS_TOKENS)
            for part in self._run(
                [tokens[first : first + PASS_TOKENS]], [len(row.prompt_ids) - first], first=first,
                end=len(tokens),
            )
        ]  # fmt: skip
        return RowFeatures(
            final=torch.cat([part.final for part in parts]),
            layers={
                layer: torch.cat([part.layers[layer] for part in parts])
                for layer in self._wanted.layers
            },
            log_sums=torch.cat([part.log_sums for part in parts]),
            tops=torch.cat([part.tops for part in parts]),
        )

    def _run(
        self,
        pieces: Sequence[Sequence[int]],
        answers: Sequence[int],
        *,
        first: int = 0,
        end: int | None = None,
    ) -> list[RowFeatures]:
        """Run one pass; `answers` say where in each piece the answer begins.

        The state before a token of the answer is the one that it comes from, so the label lies
        there; a row's last state is the label of nothing. `first` and `end` tell of a lone piece
        where it lies in its row of `end` tokens.
        """
        counts = [len(piece) for piece in pieces]
        starts = torch.tensor([0, *counts]).cumsum(0)
        looks = []
        for piece, answer, start in zip(pieces, answers, starts.tolist(), strict=False):
            is_last = end is None or first + len(piece) == end
            stop = len(piece) - 1 if is_last else len(piece)
            looks.append(range(start + max(answer - 1, 0), start + max(stop, answer - 1, 0)))
        rows = torch.tensor([each for look in looks for each in look], dtype=torch.int64)
        device = self._decoder.device
        step = ForwardInput(
            token_ids=torch.tensor([each for piece in pieces for each in piece], device=device),
            positions=torch.cat([torch.arange(first, first + n) for n in counts]).to(device),
            starts=starts.to(device),
            block_tables=_tables([end or count for count in counts]).to(device),
            logit_rows=rows.to(device),
            num_fine=0,
            num_sampling_rows=0,
        )
        with torch.inference_mode():
            logits, states = self._decoder.forward_with_states(step, self._cache, self._wanted)
            log_sums, tops = logits.logsumexp(-1).cpu(), logits.argmax(-1).cpu()
        final = states.final
        assert final is not None, "asked for"
        label = [0, *torch.tensor([len(look) for look in looks]).cumsum(0).tolist()]
        cuts = starts.tolist()
        return [
            RowFeatures(
                final=_narrow(final[cuts[i] : cuts[i + 1]], torch.float16),
                layers={
                    layer: _narrow(kept[cuts[i] : cuts[i + 1]], torch.bfloat16)
                    for layer, kept in states.layers.items()
                },
                log_sums=log_sums[label[i] : label[i + 1]],
                tops=tops[label[i] : label[i + 1]],
            )
            for i in range(len(pieces))
        ]


def _tokens(row: Row) -> list[int]:
    return [*row.prompt_ids, *row.answer_ids]


def _tables(lengths: Sequence[int]) -> Tensor:
    """Give each sequence blocks of its own, one after another."""
    counts = [-(-length // KEY_BLOCK) for length in lengths]
    tables = torch.zeros((len(counts), max(counts)), dtype=torch.int64)
    begin = 0
    for row, count in zip(tables, counts, strict=True):
        row[:count] = torch.arange(begin, begin + count)
        begin += count
    return tables


def _narrow(states: Tensor, dtype: torch.dtype) -> Tensor:
    return states.to(dtype).cpu()
