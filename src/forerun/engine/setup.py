"""From a model's files and a configuration to a runner and a scheduler that fit this machine."""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass

import torch

from ..cache.blocks import BlockPool
from ..cache.kv_cache import CacheShape, KVCache
from ..config import EngineConfig
from ..device import available_cpus, choose_device, choose_dtype
from ..draft.setting import DraftSetting
from ..errors import CapacityError, ConfigError
from ..model.arch import ModelConfig
from ..model.bits import ExactRows, try_rows
from ..model.decoder import Decoder, choose_kernels, load_decoder
from ..model.layered import linear_shapes
from ..model.loader import ModelFiles
from ..text import TextCodec
from ..types import ForwardInput
from . import memory
from .faults import Faults, FaultyPool
from .runner import TargetRunner
from .scheduler import Scheduler

__all__ = ["ExactBits", "Machinery", "make_codec", "set_up"]

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT = 8192  # longest context unless asked for more: its cache is paid for
MAX_DEFAULT_CACHE_BYTES = 4 << 30
CPU_CACHE_SHARE = 0.25  # of free memory
CUDA_CACHE_SHARE = 0.85
SMALL_MODEL = 10_000_000  # parameters
ROW_COST_REPEATS = 4
LEAST_EXACT_ROWS = 8  # smaller pieces would make verification as dear as plain decoding
MAX_EXACT_COST = 1.03


@dataclass(frozen=True, slots=True)
class ExactBits:
    """Whether a row's logits have the same bits alone, among drafts and among strangers."""

    enabled: bool
    reason: str  # why, in words for people
    rows: ExactRows | None  # what was found on this machine; None: not looked for


@dataclass(frozen=True, slots=True)
class Machinery:
    """What an engine runs on, and what was chosen for it."""

    runner: TargetRunner
    scheduler: Scheduler
    setting: DraftSetting
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    kernels: str
    num_threads: int
    kv_cache_tokens: int
    exact_bits: ExactBits


def make_codec(files: ModelFiles) -> TextCodec:
    """Wrap a model's tokenizer and chat template."""
    spec = files.tokenizer
    return TextCodec(
        spec.tokenizer,
        bos_token=spec.bos_token,
        eos_token=spec.eos_token,
        add_bos=spec.add_bos,
        chat_template=spec.chat_template,
    )


def set_up(files: ModelFiles, config: EngineConfig, faults: Faults | None = None) -> Machinery:
    """Load the weights and allocate the cache, one that fails on purpose if `faults` say so.

    Raises:
        ConfigError: a setting does not fit the model.
        CapacityError: memory is too small for the weights, or the cache for one request.
    """
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    num_threads = _set_threads(config.num_threads)
    max_model_len = _context_length(config.max_model_len, files.config.max_positions)
    exact_bits = choose_exact_bits(files.config, config, device, dtype)
    exact_rows = exact_bits.rows if exact_bits.enabled else None
    _require_memory(files, config, device, dtype, max_model_len)
    decoder = load_decoder(
        files.config,
        files.weights,
        device=device,
        dtype=dtype,
        kernels=config.kernels,
        max_positions=max_model_len,
        num_threads=num_threads,
        block_size=config.block_size,
        exact=exact_rows,
        most_rows=config.max_num_batched_tokens,
        quantize=config.quantize,
    )
    files.weights.close()
    if config.quantize != "none":
        logger.warning(
            "weights are rounded to %s: the model answers differently than in its own format "
            "(speculation changes nothing, this does)",
            config.quantize,
        )
    shape = decoder.cache_shape(config.block_size)
    num_blocks = _count_blocks(config, shape, max_model_len, device)
    size = config.block_size
    pool = BlockPool(num_blocks, size) if faults is None else FaultyPool(num_blocks, size, faults)
    scheduler = Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_draft=config.speculation.max_draft,
        share_prefixes=config.enable_prefix_caching,
        max_fine_rows=decoder.max_fine_rows,
    )
    pass_s, row_cost = measure_passes(decoder, config.block_size)
    return Machinery(
        runner=TargetRunner(decoder, num_blocks, config.block_size, row_cost, pass_s),
        setting=DraftSetting(
            target=decoder,
            tokenizer=files.tokenizer.tokenizer,
            device=device,
            dtype=dtype,
            num_threads=num_threads,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            share_prefixes=config.enable_prefix_caching,
        ),
        scheduler=scheduler,
        max_model_len=max_model_len,
        device=device,
        dtype=dtype,
        kernels=decoder.kernels,
        num_threads=num_threads,
        kv_cache_tokens=num_blocks * config.block_size,
        exact_bits=exact_bits,
    )


def measure_passes(decoder: Decoder, block_size: int) -> tuple[float, float]:
    """Measure a pass over one row, in seconds, and what one more row adds to it, in such passes.

    (0.02 with AMX, 0.1 on AVX2.) Over five rows against one, interleaved; the least of each, since
    what else runs can only add. Small models take no time worth measuring: 0.
    """
    if decoder.config.num_parameters < SMALL_MODEL:
        return 0.0, 0.0
    cache = KVCache(decoder.cache_shape(block_size), -(-5 // block_size), decoder.device)
    steps = {
        rows: ForwardInput.of_one_request(torch.arange(rows, device=decoder.device), 0, block_size)
        for rows in (1, 5)
    }
    least = dict.fromkeys(steps, math.inf)
    for _ in range(ROW_COST_REPEATS):
        for rows, step in steps.items():
            begin_s = time.perf_counter()
            decoder.forward(step, cache)
            if decoder.device.type == "cuda":
                torch.cuda.synchronize(decoder.device)
            least[rows] = min(least[rows], time.perf_counter() - begin_s)
    return least[1], max(0.0, (least[5] / least[1] - 1) / 4)


def _require_memory(
    files: ModelFiles,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
) -> None:
    """Refuse a model that cannot fit before any of it is read."""
    model = files.config
    kernels = choose_kernels(
        config.kernels, device, dtype, model, config.block_size, config.quantize
    )
    weight_bytes = dtype.itemsize
    if config.quantize == "int8":
        weight_bytes = 1
    elif kernels == "compiled" and files.weights.dtype("model.embed_tokens.weight") == "BF16":
        weight_bytes = 2
    packed_twice = kernels == "numba" and model.tie_embeddings
    shape = model.cache_shape(config.block_size, dtype)
    needs = memory.estimate(
        model,
        config,
        shape,
        max_model_len=max_model_len,
        weight_bytes=weight_bytes,
        table_copies=1 if packed_twice else 0,
    )
    memory.require(needs, memory.available_bytes(device), model)


def choose_exact_bits(
    model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> ExactBits:
    """Decide whether rows are to keep their bits, and say why.

    Raises:
        ConfigError: it is asked for and cannot be had here.
    """
    if config.exact_bits == "off":
        return ExactBits(False, "switched off", None)
    kernels = choose_kernels(
        config.kernels, device, dtype, model, config.block_size, config.quantize
    )
    if kernels == "compiled":
        return ExactBits(True, "every sum of a compiled pass is taken in one order", None)
    if kernels != "numba":
        reason = f"attention in {kernels} on {device.type} adds up in an order that varies"
        return _no_exact_bits(config, reason, None)
    rows = try_rows(linear_shapes(model), dtype, config.max_num_batched_tokens)
    if rows.max_rows < LEAST_EXACT_ROWS or rows.place_matters:
        reason = (
            f"linear layers in {dtype} change a row's bits from {rows.max_rows + 1} rows on"
            if not rows.place_matters
            else f"linear layers in {dtype} change a row's bits with its place"
        )
        return _no_exact_bits(config, reason, rows)
    if config.exact_bits == "auto" and rows.cost > MAX_EXACT_COST:
        reason = (
            f"it would cost {rows.cost - 1:.0%} of a one-row pass's linear layers on this "
            "machine; exact_bits='on' insists"
        )
        return _no_exact_bits(config, reason, rows)
    found = f"{rows.max_rows} rows and fewer give equal bits on this machine"
    return ExactBits(True, found, rows)


def _no_exact_bits(config: EngineConfig, reason: str, rows: ExactRows | None) -> ExactBits:
    if config.exact_bits == "on":
        raise ConfigError(
            f"exact_bits='on' cannot be had here: {reason}. Use exact_bits='auto' or 'off'"
        )
    logger.info("exact_bits is off: %s", reason)
    return ExactBits(False, reason, rows)


def _set_threads(wanted: int | None) -> int:
    usable = available_cpus()
    count = usable if wanted is None else wanted
    if count > usable:
        logger.warning("num_threads=%d exceeds the %d processors that may be used", count, usable)
    torch.set_num_threads(count)
    return count


def _context_length(wanted: int | None, trained: int) -> int:
    if wanted is None:
        return min(trained, DEFAULT_CONTEXT)
    if wanted > trained:
        raise ConfigError(
            f"max_model_len={wanted} exceeds the {trained} positions that the model was trained for"
        )
    return wanted


def _count_blocks(
    config: EngineConfig, shape: CacheShape, max_model_len: int, device: torch.device
) -> int:
    """Size the cache: as asked, or for every request at full length, as far as memory goes."""
    size = config.block_size
    needed = -(-max_model_len // size)
    if config.kv_cache_tokens is not None:
        count = config.kv_cache_tokens // size
        if count < needed:
            raise CapacityError(
                f"kv_cache_tokens={config.kv_cache_tokens} makes {count} blocks of {size}, but one "
                f"request of max_model_len={max_model_len} needs {needed}; "
                f"raise it to {needed * size} or lower max_model_len"
            )
        return count
    budget = _cache_budget_bytes(device)
    count = min(needed * config.max_num_seqs, budget // shape.block_bytes)
    if count < needed:
        raise CapacityError(
            f"one request of max_model_len={max_model_len} needs "
            f"{needed * shape.block_bytes / 2**20:.0f} MiB of cache, and {budget / 2**20:.0f} MiB "
            "may be used; lower max_model_len, or set kv_cache_tokens to insist"
        )
    return count


def _cache_budget_bytes(device: torch.device) -> int:
    free = memory.available_bytes(device)
    if device.type == "cuda":
        return int((free or 0) * CUDA_CACHE_SHARE)
    if free is None:  # no /proc: the system's own count of unused pages
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * CPU_CACHE_SHARE), MAX_DEFAULT_CACHE_BYTES)
