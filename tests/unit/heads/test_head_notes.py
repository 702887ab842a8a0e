"""What is decided or ignored while a head is read is said, in the head and in the log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from reference.tiny_heads import (
    TARGET,
    eagle3_speculators,
    eagle_config,
    edit_config,
    edit_tensors,
    make_head,
)
from torch import Tensor

from forerun.heads.config import EagleConfig
from forerun.heads.loader import open_head

Q = "layers.0.self_attn.q_proj.weight"


def put(folder: Path, name: str, value: Tensor) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({name: value.clone()}))


def drop(folder: Path, name: str) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop(name))


def notes_of(folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[str, ...]:
    """Open a head, whose notes must be what is logged as warnings."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="forerun"):
        notes = open_head(folder, TARGET).notes
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: {note}" for note in notes
    ]
    return notes


def layers_of(folder: Path) -> tuple[int, ...]:
    config = open_head(folder, TARGET).config
    assert isinstance(config, EagleConfig)
    return config.feature_layers


def test_layers_in_two_spellings(eagle3: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    edit_config(eagle3, **{key: [1, 4, 7]})
    assert layers_of(eagle3) == (1, 4, 7)
    edit_config(eagle3, **{key: [1, 4, 7], "eagle_config": {key: [0, 3, 6]}})
    assert layers_of(eagle3) == (1, 4, 7)
    assert notes_of(eagle3, caplog) == ()
    edit_config(eagle3, **{key: [1, 4, 7], "eagle_config": {key: [1, 4, 7]}})
    assert layers_of(eagle3) == (1, 4, 7)
    (note,) = notes_of(eagle3, caplog)
    assert "contradict" in note
    assert "[1, 4, 7] was taken" in note
    edit_config(eagle3, eagle_config={key: [-1, 3, 6]}, remove=(key,))
    assert layers_of(eagle3) == (0, 4, 7)
    edit_config(eagle3, eagle_config={"use_aux_hidden_state": True})
    assert layers_of(eagle3) == (2, 4, 5)
    edit_config(eagle3, eagle_config=None, **{key: []})
    assert layers_of(eagle3) == (2, 4, 5)


def test_norm_before_residual_that_nobody_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = eagle3_speculators(tmp_path / "head", make_head(eagle_config(TARGET, 3)))
    edit_config(folder, remove=("norm_before_residual",))
    (note,) = notes_of(folder, caplog)
    assert "norm_before_residual is missing" in note
    assert "vLLM takes true" in note
    assert open_head(folder, TARGET).config == eagle_config(TARGET, 3)
    edit_config(folder, eagle_config={"norm_before_residual": True})
    assert open_head(folder, TARGET).config == eagle_config(TARGET, 3, norm_before_residual=True)


def test_notes(eagle3: Path, caplog: pytest.LogCaptureFixture) -> None:
    def note() -> str:
        (found,) = notes_of(eagle3, caplog)
        return found

    edit_config(eagle3, max_position_embeddings=100)
    assert note().endswith("drafting stops at position 100")
    edit_config(eagle3, max_position_embeddings=128, num_hidden_layers=40)
    assert note() == "config.json says 40 layers, the files hold 1, which counts"
    edit_config(eagle3, num_hidden_layers=1, model_type="gpt_oss")
    assert note() == "model_type='gpt_oss' is not known; read as llama, by its tensors"
    edit_config(eagle3, model_type="llama", use_sliding_window=True, sliding_window=9)
    assert note().startswith("sliding_window=9 without layer_types: ignored")
    edit_config(eagle3, use_sliding_window=False)
    put(eagle3, "layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))
    assert note() == "not needed and ignored: layers.0.self_attn.rotary_emb.inv_freq"
    drop(eagle3, "layers.0.self_attn.rotary_emb.inv_freq")
    again = f"midlayer{Q[8:]}"
    edit_tensors(eagle3, lambda tensors: tensors.update({again: tensors[Q].clone()}))
    assert note() == f"{again} repeats {Q} and was ignored"
    drop(eagle3, again)
    put(eagle3, "t2d", torch.zeros(64, dtype=torch.bool))
    assert note() == "t2d marks other tokens than d2t names; d2t was taken"
    drop(eagle3, "t2d")
    assert notes_of(eagle3, caplog) == ()
    put(eagle3, "input_norm.weight", torch.ones(96))
    assert note() == "config.json says norm_before_fc=false, the files hold that norm, which counts"
