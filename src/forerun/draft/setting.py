"""What a drafter that runs a network is told of the engine it works for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from ..model.decoder import Decoder

__all__ = ["DraftSetting"]


@dataclass(frozen=True, slots=True)
class DraftSetting:
    """The target, loaded, and the sizes that the engine chose."""

    target: Decoder  # its weights are in use: read, never changed
    tokenizer: Tokenizer  # the target's
    device: torch.device
    dtype: torch.dtype
    num_threads: int
    block_size: int
    num_blocks: int  # of the target's cache
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    share_prefixes: bool  # whether requests with the same beginning share cache blocks
