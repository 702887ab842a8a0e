"""Open a draft head on disk, in any layout that is known, and check it against its target.

Only safetensors files are read here, and nothing is ever unpickled; `forerun convert` makes
safetensors of `.pt` and `.bin` files.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ..model.arch import ModelConfig
from .checks import refuse_quantised
from .config import Head
from .eagle_reading import read_eagle
from .kinds import Kind, find_kind
from .medusa_reading import read_medusa
from .source import HeadFiles, HeadSource

__all__ = ["open_head", "read_head"]

_log = logging.getLogger(__name__)


def open_head(path: Path, target: ModelConfig) -> Head:
    """Read the head in the folder `path`; what was ignored or decided is logged as a warning.

    Raises:
        ModelNotFound: there is no such folder.
        ModelFileError: a file or tensor is missing, damaged, or contradicts another.
        UnsupportedModel: sound, but another kind of head, or a head for another target.
    """
    head = read_head(HeadFiles(path), target)
    for note in head.notes:
        _log.warning("%s: %s", path, note)
    return head


def read_head(source: HeadSource, target: ModelConfig) -> Head:
    """Make sense of a head's configuration and tensors; raises what `open_head` does."""
    kind = find_kind(source)
    refuse_quantised(source)
    if kind is Kind.MEDUSA:
        return read_medusa(source, target)
    return read_eagle(source, target, 3 if kind is Kind.EAGLE3 else 1)
