"""Write a draft head such that other engines read it too: whole, or not at all.

`spelling` says what the files look like. A folder is written beside its final name and renamed.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ConfigError, ModelFileError, UnsupportedModel
from ..model.writer import sync_folder, sync_path
from .checks import check_shapes
from .config import EagleConfig, Head, HeadConfig
from .source import CONFIG
from .spelling import spell_config, spell_tensors

__all__ = ["save_head", "write_folder"]

_log = logging.getLogger(__name__)


def save_head(
    head: Head,
    folder: Path,
    *,
    verifier: str,
    num_speculative_tokens: int,
    architectures: Sequence[str],
) -> None:
    """Write `head` to a new `folder`; `verifier` and its `architectures` name its target.

    Raises:
        ConfigError: the folder is there and not empty, or a name or number is missing.
        UnsupportedModel: a head that the format cannot hold, or that other engines would misread.
        ModelFileError: the weights or draft ids do not fit the head's own configuration.
    """
    if num_speculative_tokens < 1:
        raise ConfigError(f"num_speculative_tokens={num_speculative_tokens} must be at least 1")
    if not verifier or not architectures:
        raise ConfigError(
            f"verifier={verifier!r} of architectures={list(architectures)}: name the target that "
            "the head belongs to, and its class"
        )
    _check_head(head, str(folder))
    if isinstance(head.config, EagleConfig) and head.config.generation == 3:
        _check_portable(head.config, folder)
    config = spell_config(head, verifier, num_speculative_tokens, architectures)
    write_folder(folder, config, spell_tensors(head))


def write_folder(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors as the folder `folder`, whole or not at all.

    Raises:
        ConfigError: there is something at `folder`, or the disk does not take it.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there already; choose another folder or remove it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _write_files(work / "head", config, tensors)
            (work / "head").replace(folder)
            sync_path(folder.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error


def _write_files(work: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    work.mkdir()  # unlike the folder around it, as public as others that this user makes
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (work / CONFIG).write_text(text, encoding="utf-8")
    save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(work / CONFIG, work / "model.safetensors")
    sync_folder(work)


def _check_head(head: Head, where: str) -> None:
    """Hold a head's weights and ids against its own configuration."""
    config = head.config
    shapes = {name: tuple(each.shape) for name, each in head.weights.items()}
    check_shapes(where, config, shapes, {name: name for name in shapes})
    for name, weight in head.weights.items():
        if not all(torch.isfinite(extreme) for extreme in weight.aminmax()):
            raise ModelFileError(f"{where}: {name} holds NaN or infinity; its training diverged")
    _check_ids(head.draft_ids, config, where)


def _check_ids(ids: Tensor | None, config: HeadConfig, where: str) -> None:
    draft, vocab = config.draft_vocab_size, config.vocab_size
    if ids is None:
        fits = draft == vocab
    else:
        fits = (
            draft < vocab
            and ids.dtype == torch.int64
            and ids.shape == (draft,)
            and bool((ids >= 0).all() and (ids < vocab).all())
            and len(ids.unique()) == draft
        )
    if not fits:
        raise ModelFileError(
            f"{where}: draft_ids must be {draft} different int64 ids below {vocab}, or None where "
            "both vocabularies are the same"
        )


def _check_portable(config: EagleConfig, folder: Path) -> None:
    """Refuse an EAGLE-3 head that vLLM or SGLang would read as another one."""
    if config.norm_before_residual:
        raise UnsupportedModel(
            f"{folder}: norm_before_residual=true cannot be written: SGLang computes as if it were "
            "false; train the head with false"
        )
    if config.fc_bias:
        raise UnsupportedModel(
            f"{folder}: fc_bias=true cannot be written: EAGLE-3 in vLLM has no fc.bias; train the "
            "head without"
        )
    if not config.own_head and config.draft_vocab_size < config.vocab_size:
        raise UnsupportedModel(
            f"{folder}: a draft vocabulary of {config.draft_vocab_size} tokens without a "
            "projection of its own cannot be written: other engines do not cut the target's; put "
            "the rows draft_ids of the target's projection into head.weight and set own_head"
        )
    layer = config.layer
    if layer.qk_norm or layer.qkv_bias:
        _log.warning("%s: vLLM reads query and key norms and biases; SGLang ignores them", folder)
