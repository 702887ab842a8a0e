"""Whether weights, cache and workspace fit the memory at hand, asked before anything is loaded.

A process that runs out of memory while it loads is killed without a word, or makes the whole
machine swap. So the sum is made first, from the model's shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..cache.kv_cache import CacheShape
from ..config import EngineConfig
from ..errors import CapacityError
from ..model.arch import ModelConfig

__all__ = ["Needs", "available_bytes", "estimate", "require"]

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that an engine cannot do without."""

    weights: int
    cache: int  # what was asked for, or one request of the longest context
    workspace: int  # a step of the most tokens, with logits for all that may be sampled

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.workspace


def estimate(
    model: ModelConfig,
    config: EngineConfig,
    shape: CacheShape,
    *,
    max_model_len: int,
    weight_bytes: int,
    table_copies: int,
) -> Needs:
    """Sum up what an engine needs.

    `weight_bytes` is the size of one weight as it will lie in memory; `table_copies` says how often
    the table of embeddings lies there beside its own place in the sum: packed layers of a library
    cannot be read by token.
    """
    table = model.vocab_size * model.hidden_size
    weights = (model.num_parameters + table_copies * table) * weight_bytes
    tokens = config.kv_cache_tokens or max_model_len
    rows = config.max_num_batched_tokens
    sampled = min(rows, config.max_num_seqs * (config.speculation.max_draft + 1))
    attention = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    inner = 2 * model.hidden_size + 2 * attention + model.intermediate_size
    return Needs(
        weights=weights,
        cache=-(-tokens // shape.block_size) * shape.block_bytes,
        workspace=4 * (rows * inner + sampled * model.vocab_size),
    )


def require(needs: Needs, available: int | None, model: ModelConfig) -> None:
    """Refuse what cannot fit.

    Raises:
        CapacityError: with the sum, and what to lower.
    """
    if available is None or needs.total <= available:
        return
    mib = 2**20
    raise CapacityError(
        f"{needs.total / mib:.0f} MiB are needed and {available / mib:.0f} MiB are free: weights "
        f"{needs.weights / mib:.0f}, cache {needs.cache / mib:.0f}, workspace "
        f"{needs.workspace / mib:.0f}. Lower max_model_len (trained for {model.max_positions}) or "
        "kv_cache_tokens for the cache, max_num_batched_tokens or max_num_seqs for the workspace, "
        "or take quantize='int8' or a smaller model for the weights"
    )


def available_bytes(
    device: torch.device, meminfo: Path = MEMINFO, cgroup: Path = CGROUP
) -> int | None:
    """Say how much memory may still be taken, a container's limit respected; None: unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [each for each in (_free(meminfo), _left(cgroup)) if each is not None]
    return min(found, default=None)


def _free(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    kib = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kib[0]) * 1024 if kib else None


def _left(cgroup: Path) -> int | None:
    """Read what a cgroup (version 2) leaves; page cache that can be dropped counts as free."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        cached = [
            int(line.split()[1])
            for line in (cgroup / "memory.stat").read_text().splitlines()
            if line.startswith("inactive_file ")
        ]
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + sum(cached)
