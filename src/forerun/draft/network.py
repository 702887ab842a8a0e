"""A draft model's weights with the tensors of its own cache: passes over pieces of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..cache.kv_cache import CacheShape
from ..model.cached import CachedDecoder
from ..model.decoder import Decoder
from ..model.graphs import Capture
from .rows import RequestRows, lay_out
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
        """See `CachedDecoder`."""
        self._passes = CachedDecoder(decoder, num_blocks, block_size, capture)

    @property
    def decoder(self) -> Decoder:
        """The weights."""
        return self._passes.decoder

    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Do one pass: logits [M, V] float32 of the last tokens of the pieces that want them."""
        return self._passes.forward(lay_out([_rows(piece) for piece in pieces]))[0]

    def scrub(self, block: int, offset: int) -> None:
        """Zero a block from an offset on, where NaN may lie."""
        self._passes.scrub(block, offset)


def count_blocks(setting: DraftSetting, shape: CacheShape, max_positions: int) -> int:
    """Size a draft's cache: for every request at full length, within a share of the target's.

    At least one request of full length has room in it. Those that find none decode plainly.
    """
    each = -(-max_positions // setting.block_size)
    target_shape = setting.target.cache_shape(setting.block_size)
    target_bytes = setting.num_blocks * target_shape.block_bytes
    budget = min(int(target_bytes * CACHE_SHARE), MAX_CACHE_BYTES)
    return max(each, min(each * setting.max_num_seqs, budget // shape.block_bytes))


def _rows(piece: Piece) -> RequestRows:
    count = len(piece.token_ids)
    positions = range(piece.first, piece.first + count)
    looks = [count - 1] if piece.wants_logits else []
    return RequestRows(piece.token_ids, positions, piece.blocks, looks)
