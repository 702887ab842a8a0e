"""Medusa heads as they run: all of them over the same rows, and one look at the vocabulary.

Head i reads the state that the target's vocabulary projection read, and guesses the token i + 2
positions on (Medusa 2401.10774, section 2.1). The heads know nothing of each other's guesses.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..model.arrays import Array, view
from ..model.compiled import CompiledDecoder
from ..model.decoder import Decoder
from ..model.linear import pack_linear
from ..model.panels import PANEL, allocate, fill
from .config import Head, MedusaConfig
from .eagle_runner import HeadPlace

__all__ = ["CompiledMedusa", "LayeredMedusa", "MedusaRunner", "load_medusa"]


class MedusaRunner(Protocol):
    """Runs the heads and knows nothing of requests."""

    config: MedusaConfig

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [H, N, D] float32 of final hidden states [N, E]."""
        ...


def load_medusa(head: Head, place: HeadPlace) -> MedusaRunner:
    """Lay the heads' weights out for the machine that their target runs on."""
    assert isinstance(head.config, MedusaConfig), "another kind of head"
    shares = head.config.shared_head or not head.config.own_head
    if isinstance(place.target, CompiledDecoder) and shares and head.config.num_blocks:
        return CompiledMedusa(head, place)
    return LayeredMedusa(head, place)


class LayeredMedusa:
    """The heads in plain torch, on any device."""

    def __init__(self, head: Head, place: HeadPlace) -> None:
        assert isinstance(head.config, MedusaConfig), "another kind of head"
        self.config = head.config
        self._device, self._dtype = place.target.device, place.target.dtype
        self._blocks = [
            [pack_linear(*self._pair(head, f"heads.{i}.blocks.{j}")) for j in self._each_block]
            for i in range(self.config.num_heads)
        ]
        tables = _vocabularies(head, place.target)
        packed = [pack_linear(table.to(self._device, self._dtype)) for table in tables]
        self._heads = packed if len(packed) > 1 else packed * self.config.num_heads

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [H, N, D] float32 of final hidden states [N, E]."""
        x = x.to(self._device, self._dtype)
        results = []
        for blocks, head in zip(self._blocks, self._heads, strict=True):
            y = x
            for block in blocks:
                y = y + functional.silu(block(y))
            results.append(head(y).float())
        return torch.stack(results)

    @property
    def _each_block(self) -> range:
        return range(self.config.num_blocks)

    def _pair(self, head: Head, name: str) -> tuple[Tensor, Tensor | None]:
        bias = head.weights.get(f"{name}.bias")
        return (
            head.weights[f"{name}.weight"].to(self._device, self._dtype),
            None if bias is None else bias.to(self._device, self._dtype),
        )


class CompiledMedusa:
    """The heads as one compiled pass on the CPU, where all share one vocabulary."""

    def __init__(self, head: Head, place: HeadPlace) -> None:
        from ..kernels.workers import shared_workers

        assert isinstance(head.config, MedusaConfig), "another kind of head"
        assert isinstance(place.target, CompiledDecoder), "compiled beside a compiled target"
        self.config = head.config
        config, size = head.config, head.config.hidden_size
        self._dtype = place.target.dtype
        self._workers = shared_workers(place.num_threads)
        count = config.num_heads * config.num_blocks
        form = "bfloat16" if self._dtype == torch.bfloat16 else "float32"
        self._blocks = allocate(count, size, size, form=form)
        self._biases = np.zeros((count, self._blocks.shape[1] * PANEL), np.float32)
        none = np.empty(0, np.float32)
        for index in range(count):
            name = f"heads.{index // config.num_blocks}.blocks.{index % config.num_blocks}"
            fill(self._blocks[index], head.weights[f"{name}.weight"], none)
            bias = head.weights.get(f"{name}.bias")
            if bias is not None:
                self._biases[index, :size] = bias.float().numpy()
        shared = place.target.head_panels
        if head.draft_ids is None and not config.own_head and shared is not None:
            self._head, self._head_bias = shared  # one table, not two
        else:
            (table,) = _vocabularies(head, place.target)
            self._head = allocate(1, *table.shape, form=form)
            fill(self._head[0], table, none)
            self._head_bias = np.zeros((1, self._head.shape[1] * PANEL), np.float32)
        self.forward(torch.zeros(1, size, dtype=self._dtype))  # so that it is compiled

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [H, N, D] float32 of final hidden states [N, E]."""
        from ..kernels.head import medusa_pass
        from ..kernels.team import new_counters

        num_rows, size = x.shape
        heads = self.config.num_heads
        stored = np.uint16 if self._dtype == torch.bfloat16 else np.float32
        logits = np.empty((heads * num_rows, self._head.shape[1] * PANEL), np.float32)
        read: Array = view(x.to(self._dtype).float().contiguous())
        self._workers.run(
            medusa_pass,
            read,
            self._blocks,
            self._biases,
            self._head,
            self._head_bias,
            np.zeros((1, 0), np.float32),
            np.empty((num_rows, size), stored),
            np.empty((heads * num_rows, size), np.float32),
            logits,
            new_counters(2 * len(self._blocks) + 1),
        )
        found = torch.from_numpy(logits).view(heads, num_rows, -1)
        return found[:, :, : self.config.draft_vocab_size]


def _vocabularies(head: Head, target: Decoder) -> list[Tensor]:
    """List the vocabulary projections: one for all heads, or one for each."""
    config = head.config
    assert isinstance(config, MedusaConfig), "another kind of head"
    if not config.own_head:
        ids = head.draft_ids
        return [target.head_rows(torch.arange(config.vocab_size) if ids is None else ids)]
    if config.shared_head:
        return [head.weights["out.weight"]]
    return [head.weights[f"heads.{index}.out.weight"] for index in range(config.num_heads)]
