"""A draft model's weights with the tensors of its own cache: passes over pieces of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.kv_cache import CacheShape, KVCache
from ..model.decoder import Decoder
from ..model.graphs import Capture, CudaCapture, GraphedDecoder
from ..model.layered import LayeredDecoder
from ..types import ForwardInput
from .setting import DraftSetting

__all__ = ["DraftNetwork", "Piece", "count_blocks"]

# A draft's cache is worth memory as far as the target's is not short of it:
CACHE_SHARE = 0.25  # of what the target's takes
MAX_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one request, of which the last may say what comes next."""

    token_ids: Sequence[int]
    first: int  # position of the first of them
    blocks: Sequence[int]  # of the request, up to the last of them at least
    wants_logits: bool = True


class DraftNetwork:
    """Runs passes and knows nothing of requests."""

    def __init__(
        self, decoder: Decoder, num_blocks: int, block_size: int, capture: Capture | None = None
    ) -> None:
        """`capture` makes small passes cheaper to launch (`model.graphs`); CUDA has its own."""
        self._decoder = decoder
        if capture is None and decoder.device.type == "cuda":
            capture = CudaCapture(decoder.device)
        # Padded rows of captured passes write to a block after those that requests may own.
        num_spare = 0 if capture is None else 1
        shape = decoder.cache_shape(block_size)
        self._cache = KVCache(shape, num_blocks + num_spare, decoder.device)
        self._graphed: GraphedDecoder | None = None
        if capture is not None:
            assert isinstance(decoder, LayeredDecoder), "compiled passes are not captured"
            self._graphed = GraphedDecoder(decoder, self._cache, num_blocks, capture)

    @property
    def decoder(self) -> Decoder:
        """The weights."""
        return self._decoder

    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Do one pass: logits [M, V] float32 of the last tokens of the pieces that want them."""
        step = _lay_out(pieces)
        if self._graphed is not None:
            return self._graphed.forward(step)[0]
        return self._decoder.forward(step, self._cache)

    def scrub(self, block: int, offset: int) -> None:
        """Zero a block from an offset on, where NaN may lie."""
        self._cache.scrub(block, offset)


def count_blocks(setting: DraftSetting, shape: CacheShape, max_positions: int) -> int:
    """Size a draft's cache: for every request at full length, within a share of the target's.

    At least one request of full length has room in it. Those that find none decode plainly.
    """
    each = -(-max_positions // setting.block_size)
    target_shape = setting.target.cache_shape(setting.block_size)
    target_bytes = setting.num_blocks * target_shape.block_bytes
    budget = min(int(target_bytes * CACHE_SHARE), MAX_CACHE_BYTES)
    return max(each, min(each * setting.max_num_seqs, budget // shape.block_bytes))


def _lay_out(pieces: Sequence[Piece]) -> ForwardInput:
    """Lay pieces out as a step on the host."""
    token_ids: list[int] = []
    positions: list[int] = []
    starts, logit_rows = [0], []
    for piece in pieces:
        token_ids.extend(piece.token_ids)
        positions.extend(range(piece.first, piece.first + len(piece.token_ids)))
        starts.append(len(token_ids))
        if piece.wants_logits:
            logit_rows.append(len(token_ids) - 1)
    width = max(len(piece.blocks) for piece in pieces)
    tables = [[*piece.blocks, *[0] * (width - len(piece.blocks))] for piece in pieces]
    return ForwardInput(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        starts=torch.tensor(starts),
        block_tables=torch.tensor(tables),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        num_fine=len(token_ids),
        num_sampling_rows=len(logit_rows),
    )
