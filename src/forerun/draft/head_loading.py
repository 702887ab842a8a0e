"""From a head's files to a drafter beside the loaded target."""

from __future__ import annotations

from pathlib import Path

from ..config import MAX_DRAFT, SpeculationConfig
from ..errors import ConfigError
from ..heads.config import EagleConfig, Head, MedusaConfig
from ..heads.eagle_runner import HeadPlace, load_eagle
from ..heads.kinds import Kind, find_kind
from ..heads.loader import open_head
from ..heads.medusa_runner import load_medusa
from ..heads.source import HeadFiles
from ..registry import resolve_model
from .base import Drafter
from .eagle import EagleDrafter
from .medusa import MedusaDrafter
from .setting import DraftSetting

__all__ = ["make_eagle", "make_medusa", "name_drafter"]

WHOLE_MODEL = "model.layers.0.input_layernorm.weight"  # which no head has


def make_eagle(config: SpeculationConfig, setting: DraftSetting) -> Drafter:
    """Load an EAGLE head.

    Raises:
        ConfigError: the head is of another kind.
        ModelFileError, UnsupportedModel: it cannot be read, or does not fit the target.
    """
    head = _open(config, setting)
    if not isinstance(head.config, EagleConfig):
        raise ConfigError(f"{config.model!r} holds Medusa heads; use drafter='medusa'")
    return EagleDrafter(
        load_eagle(head, _place(setting)),
        head.draft_ids,
        num_blocks=setting.num_blocks,
        block_size=setting.block_size,
        most_rows=setting.max_num_batched_tokens,
        device=setting.target.device,
        trees=config.draft_trees,
    )


def make_medusa(config: SpeculationConfig, setting: DraftSetting) -> Drafter:
    """Load Medusa heads; raises what `make_eagle` does."""
    head = _open(config, setting)
    if not isinstance(head.config, MedusaConfig):
        raise ConfigError(f"{config.model!r} holds an EAGLE head; use drafter='eagle'")
    return MedusaDrafter(
        load_medusa(head, _place(setting)),
        head.draft_ids,
        trees=config.draft_trees,
        choices=config.medusa_choices,
    )


def name_drafter(model: str) -> str:
    """Say which drafter a configured model or head is for, by what is in its files.

    Raises:
        ModelNotFound: there is none.
        ModelFileError, UnsupportedModel: a head that cannot be read, or of no known kind.
    """
    path = Path(resolve_model(model))
    if path.is_file():
        return "draft-model"
    files = HeadFiles(path)
    if WHOLE_MODEL in files.names:
        return "draft-model"
    return "medusa" if find_kind(files) is Kind.MEDUSA else "eagle"


def _open(config: SpeculationConfig, setting: DraftSetting) -> Head:
    assert config.model is not None, "the configuration checks it"
    return open_head(Path(resolve_model(config.model)), setting.target.config)


def _place(setting: DraftSetting) -> HeadPlace:
    return HeadPlace(
        target=setting.target,
        num_threads=setting.num_threads,
        block_size=setting.block_size,
        max_positions=setting.max_model_len + MAX_DRAFT,
    )
