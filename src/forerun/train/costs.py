"""What passes cost here, and the speed-up that follows from them and a head's acceptance."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache.kv_cache import KVCache
from ..heads.config import EagleConfig, Head
from ..heads.eagle_runner import HeadPlace, load_eagle
from ..heads.medusa_runner import load_medusa
from ..model.decoder import KEY_BLOCK, Decoder
from ..types import ForwardInput
from .target import Target

__all__ = ["Costs", "measure_costs"]

REPEATS = 6
POSITIONS = 128


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of passes, the least of several: what else runs can only add."""

    target_s: float  # one row
    row: float  # what one more row adds to a pass of the target, in passes of one row
    head: float  # a pass of the head (Medusa: of all heads at once), in passes of one row
    is_chain: bool  # each draft takes a pass of the head

    def speedup(self, length: float, num_drafts: int) -> float:
        """Project the speed-up of chains that bring `length` tokens a pass."""
        passes = num_drafts if self.is_chain else 1
        return length / (1 + num_drafts * self.row + passes * self.head)


def measure_costs(head: Head, target: Target) -> Costs:
    """Time the target's passes over one row and five, and the head's over one."""
    decoder = target.decoder
    cache = KVCache(decoder.cache_shape(KEY_BLOCK), POSITIONS // KEY_BLOCK, decoder.device)

    def target_pass(rows: int) -> Callable[[], object]:
        step = _step(rows, decoder)
        return lambda: decoder.forward(step, cache)

    runs = [target_pass(1), target_pass(5), _head_pass(head, target)]
    least = [math.inf] * len(runs)
    for _ in range(REPEATS):
        for index, run in enumerate(runs):
            begin_s = time.perf_counter()
            run()
            if decoder.device.type == "cuda":
                torch.cuda.synchronize(decoder.device)
            least[index] = min(least[index], time.perf_counter() - begin_s)
    one, five, of_head = least
    row = max(0.0, (five / one - 1) / 4)
    return Costs(one, row, of_head / one, isinstance(head.config, EagleConfig))


def _head_pass(head: Head, target: Target) -> Callable[[], object]:
    decoder = target.decoder
    place = HeadPlace(decoder, target.num_threads, KEY_BLOCK, POSITIONS)
    size = target.config.hidden_size
    if not isinstance(head.config, EagleConfig):
        heads = load_medusa(head, place)
        return lambda: heads.forward(torch.zeros(1, size, dtype=decoder.dtype))
    runner = load_eagle(head, place)
    cache = KVCache(runner.cache_shape(KEY_BLOCK), POSITIONS // KEY_BLOCK, decoder.device)
    step, states = _step(1, decoder), torch.zeros(1, head.config.layer.hidden_size)
    return lambda: runner.forward(step, cache, states.to(decoder.dtype), of_target=False)


def _step(rows: int, decoder: Decoder) -> ForwardInput:
    tokens = torch.zeros(rows, dtype=torch.int64, device=decoder.device)
    return ForwardInput.of_one_request(tokens, 0, KEY_BLOCK)
