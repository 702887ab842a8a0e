"""One head on disk, with plain names, so that its fields and tensors are easily spoilt."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference.tiny_heads import TARGET, eagle3_vllm, eagle_config, edit_tensors, make_head
from torch import Tensor


@pytest.fixture
def eagle3(tmp_path: Path) -> Path:
    """An EAGLE-3 head for `TARGET`: a flat configuration, tensors without prefix."""
    folder = eagle3_vllm(tmp_path / "head", make_head(eagle_config(TARGET, 3)))

    def shorten(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    return edit_tensors(folder, shorten)
