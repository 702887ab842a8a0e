"""From a configuration to a draft model that fits its target, or the reason why there is none."""

from __future__ import annotations

import logging

import torch

from ..config import SpeculationConfig
from ..errors import CapacityError, ConfigError
from ..model.decoder import load_decoder
from ..model.loader import ModelFiles, open_model
from ..registry import resolve_model
from .draft_cache import DraftCache
from .model import DraftModelDrafter
from .network import DraftNetwork, count_blocks
from .setting import DraftSetting
from .vocabulary import Link, LinkKind, Side, link_vocabularies

__all__ = ["make_draft_model"]

logger = logging.getLogger(__name__)

TEXT_POSITIONS = 2  # of a draft model for one of the target's, where it reads its own tokens


def make_draft_model(config: SpeculationConfig, setting: DraftSetting) -> DraftModelDrafter:
    """Load the configured draft model for a target.

    Raises:
        ModelNotFound, ModelFileError, UnsupportedModel: what is wrong with it, or between the two.
        ConfigError: sampled drafts, and another vocabulary.
        CapacityError: there is no memory for it.
    """
    assert config.model is not None, "the config refuses to be without"
    files = open_model(resolve_model(config.model))
    link = link_vocabularies(_target_side(setting), _draft_side(files))
    sampled = config.draft_sampling == "sampled"
    if sampled and link.kind is not LinkKind.SAME:
        raise ConfigError(
            f"draft_sampling='sampled' needs a draft model of the target's vocabulary; "
            f"{config.model} has another. Use draft_sampling='greedy'"
        )
    reach = setting.max_model_len * (1 if link.spellers is None else TEXT_POSITIONS)
    max_positions = min(reach, files.config.max_positions)
    try:
        network, cache = _load(files, setting, max_positions)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CapacityError(
            f"no memory is left for the draft model {config.model}; lower kv_cache_tokens, or take "
            "a smaller one"
        ) from error
    cost = files.config.num_parameters / setting.target.config.num_parameters
    _tell(config.model, files, link, setting, cost)
    return DraftModelDrafter(
        network,
        cache,
        link,
        sampled=sampled,
        max_positions=max_positions,
        most_rows=setting.max_num_batched_tokens,
        cost=cost,
    )


def _load(
    files: ModelFiles, setting: DraftSetting, max_positions: int
) -> tuple[DraftNetwork, DraftCache]:
    decoder = load_decoder(
        files.config,
        files.weights,
        device=setting.device,
        dtype=setting.dtype,
        max_positions=max_positions,
        num_threads=setting.num_threads,
        block_size=setting.block_size,
    )
    files.weights.close()
    size = setting.block_size
    num_blocks = count_blocks(setting, decoder.cache_shape(size), max_positions)
    network = DraftNetwork(decoder, num_blocks, size)
    return network, DraftCache(
        num_blocks, size, network.scrub, share_prefixes=setting.share_prefixes
    )


def _target_side(setting: DraftSetting) -> Side:
    config = setting.target.config
    return Side(setting.tokenizer, config.vocab_size, config.bos_token_id, config.eos_token_ids)


def _draft_side(files: ModelFiles) -> Side:
    config, spec = files.config, files.tokenizer
    named = None if spec.bos_token is None else spec.tokenizer.token_to_id(spec.bos_token)
    bos = config.bos_token_id if named is None else named
    return Side(spec.tokenizer, config.vocab_size, bos, config.eos_token_ids, spec.add_bos)


def _tell(model: str, files: ModelFiles, link: Link, setting: DraftSetting, cost: float) -> None:
    """Say what is worth knowing of a pair."""
    if link.kind is not LinkKind.SAME:
        logger.warning(
            "%s has another vocabulary than the target (%.0f %% of the target's tokens are in it): "
            "drafts go by %s",
            model, 100 * link.map.share, "text" if link.kind is LinkKind.TEXT else "shared tokens",
        )  # fmt: skip
    if files.config.max_positions < setting.max_model_len:
        logger.warning(
            "%s reads %d positions, the target up to %d: no drafts beyond",
            model, files.config.max_positions, setting.max_model_len,
        )  # fmt: skip
    if cost >= 1:
        logger.warning("%s is no smaller than the target: its drafts cannot pay", model)
