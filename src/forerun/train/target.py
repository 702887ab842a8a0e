"""The model that a head is trained for: its decoder, without an engine around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..device import available_cpus, choose_device, choose_dtype
from ..model.arch import ModelConfig
from ..model.decoder import Decoder, load_decoder
from ..model.loader import open_model
from ..registry import resolve_model

__all__ = ["Target", "load_target"]

MAX_POSITIONS = 8192  # whose rotations are tabulated, unless the model was trained for fewer


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded model, and what its files say of it."""

    name: str  # as the user named it
    decoder: Decoder
    config: ModelConfig
    fingerprint: str
    num_threads: int
    tokens: dict[str, int]  # the vocabulary, as the tokenizer spells it
    special_ids: tuple[int, ...]


def load_target(
    name: str, *, num_threads: int | None = None, device: str = "auto", kernels: str = "auto"
) -> Target:
    """Load a model by pulled name, folder or .gguf file, in the format that an engine uses.

    Raises:
        ModelNotFound, ModelFileError, UnsupportedModel: what is wrong with the model.
    """
    files = open_model(resolve_model(name))
    threads = num_threads or available_cpus()
    torch.set_num_threads(threads)
    place = choose_device(device)
    decoder = load_decoder(
        files.config,
        files.weights,
        device=place,
        dtype=choose_dtype("auto", place),
        kernels=kernels,
        max_positions=min(MAX_POSITIONS, files.config.max_positions),
        num_threads=threads,
    )
    fingerprint = files.fingerprint()
    files.weights.close()
    tokenizer = files.tokenizer.tokenizer
    special = [id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return Target(
        name=name,
        decoder=decoder,
        config=files.config,
        fingerprint=fingerprint,
        num_threads=threads,
        tokens=tokenizer.get_vocab(),
        special_ids=tuple(sorted(special)),
    )
