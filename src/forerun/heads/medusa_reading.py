"""Read Medusa heads: the original layout, and vLLM's and speculators' renaming of it.

    original        {head}.{block}.linear.weight, .bias; {head}.{number of blocks}.weight
    vLLM's          blocks.{head}.layers.{block}.weight, .bias; lm_heads.{head}.weight
    a shared one    lm_head.weight, or lm_heads.0.weight with original_lm_head in the config
    none at all     every head uses the target's vocabulary projection
    a vocabulary    token_map (ids) in vLLM's, d2t (offsets) in speculators' and ours

The number of heads in config.json is wrong in well-known uploads: tensors count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..errors import ModelFileError, UnsupportedModel
from ..model.arch import ModelConfig
from .checks import read_weights
from .config import Head, MedusaConfig
from .kinds import plain_name
from .provenance import read_provenance
from .source import HeadSource, some
from .vocabulary import check_mask, read_ids, read_offsets

__all__ = ["read_medusa"]

_BLOCK = re.compile(r"(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
_OUT = re.compile(r"(\d+)\.(\d+)\.weight|lm_heads\.(\d+)\.weight")
_COUNTS = ("medusa_num_heads", "num_heads")


@dataclass(slots=True)
class _Found:
    """The tensors of a checkpoint by what they are."""

    stored: dict[str, str] = field(default_factory=dict)  # our name -> the file's
    blocks: dict[int, set[int]] = field(default_factory=dict)  # head -> its blocks
    outs: dict[int, int | None] = field(default_factory=dict)  # head -> its place after the blocks
    maps: dict[str, str] = field(default_factory=dict)  # token_map, d2t, t2d
    unknown: list[str] = field(default_factory=list)


def read_medusa(source: HeadSource, target: ModelConfig) -> Head:
    """Read and check Medusa heads for `target`; raises what `open_head` does."""
    found = _find(source)
    num_heads, num_blocks = _count(source, found)
    _share(source, found, num_heads)
    _check_target(source, found, target)
    draft_vocab_size, ids = _read_vocabulary(source, found, target)
    stored = found.stored
    config = MedusaConfig(
        num_heads=num_heads,
        num_blocks=num_blocks,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        shared_head=not found.outs,
        own_head=bool(found.outs) or "out.weight" in stored,
        block_bias=any(name.endswith(".bias") for name in stored),
    )
    weights = read_weights(_Cut(source, stored, ids), config, stored)
    origin = read_provenance(source)
    mask_notes = check_mask(source, found.maps.get("t2d"), ids)
    return Head(
        config=config,
        weights=weights,
        draft_ids=ids,
        verifier=origin.verifier,
        num_speculative_tokens=origin.num_speculative_tokens,
        notes=(*_miscounted(source, num_heads), *mask_notes),
    )


class _Cut:
    """A source whose vocabulary projections are cut to the draft vocabulary, where they are whole.

    vLLM's files may hold the whole projection beside the map of what is drafted.
    """

    def __init__(self, source: HeadSource, stored: Mapping[str, str], ids: Tensor | None) -> None:
        self._source = source
        self._ids = ids
        self._outs = {name for ours, name in stored.items() if ours.endswith("out.weight")}
        self.where = source.where
        self.config = source.config
        self.names = source.names

    def _is_whole(self, name: str) -> bool:
        rows = self._source.shape(name)[0] if self._source.shape(name) else 0
        return self._ids is not None and name in self._outs and rows > len(self._ids)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(name)
        if self._ids is None or not self._is_whole(name):
            return shape
        return (len(self._ids), *shape[1:])

    def dtype(self, name: str) -> str:
        return self._source.dtype(name)

    def read(self, name: str) -> Tensor:
        weight = self._source.read(name)
        return weight[self._ids] if self._ids is not None and self._is_whole(name) else weight


def _find(source: HeadSource) -> _Found:
    found = _Found()
    for name in sorted(source.names):
        plain = plain_name(name)
        if block := _BLOCK.fullmatch(plain):
            head, index = (int(each) for each in block.groups()[:4] if each is not None)
            found.blocks.setdefault(head, set()).add(index)
            ours = f"heads.{head}.blocks.{index}.{block[5]}"
        elif out := _OUT.fullmatch(plain):
            head = int(out[1] if out[3] is None else out[3])
            found.outs[head] = None if out[2] is None else int(out[2])
            ours = f"heads.{head}.out.weight"
        elif plain == "lm_head.weight":
            ours = "out.weight"
        elif plain in ("token_map", "d2t", "t2d"):
            found.maps[plain] = name
            continue
        else:
            found.unknown.append(name)
            continue
        if ours in found.stored:
            raise ModelFileError(f"{source.where}: {found.stored[ours]} and {name} are one tensor")
        found.stored[ours] = name
    if found.unknown:
        raise UnsupportedModel(
            f"{source.where}: {len(found.unknown)} tensors that Medusa heads have no place for: "
            f"{some(found.unknown)}"
        )
    return found


def _count(source: HeadSource, found: _Found) -> tuple[int, int]:
    """Count heads and the blocks of each; none may be left out."""
    num_heads = 1 + max([*found.blocks, *found.outs])
    num_blocks = 1 + max(max(blocks) for blocks in found.blocks.values())
    for head in range(num_heads):
        have = found.blocks.get(head, set())
        if len(have) != num_blocks:  # a block beyond the count cannot be: it is the count
            raise ModelFileError(
                f"{source.where}: head {head} of {num_heads} has {len(have)} blocks, expected "
                f"{num_blocks}"
            )
        if found.outs.get(head) not in (None, num_blocks):
            raise ModelFileError(
                f"{source.where}: head {head} has its vocabulary projection at "
                f"{found.outs[head]}, expected after its {num_blocks} blocks"
            )
    return num_heads, num_blocks


def _share(source: HeadSource, found: _Found, num_heads: int) -> None:
    """Give a projection that all heads share its own name."""
    only_first = set(found.outs) == {0} and num_heads > 1
    if only_first and source.config.get("original_lm_head"):
        found.stored["out.weight"] = found.stored.pop("heads.0.out.weight")
        found.outs.clear()
    if "out.weight" in found.stored and found.outs:
        raise UnsupportedModel(
            f"{source.where}: a shared vocabulary projection (lm_head) and those of "
            f"{len(found.outs)} heads; supported: one kind"
        )


def _check_target(source: HeadSource, found: _Found, target: ModelConfig) -> None:
    shape = source.shape(found.stored["heads.0.blocks.0.weight"])
    if len(shape) != 2 or shape[1] != target.hidden_size:
        raise UnsupportedModel(
            f"{source.where}: the heads are for a hidden size of {shape[-1] if shape else 0}, the "
            f"target has {target.hidden_size}; use the target that they were trained for"
        )
    for key in ("vocab_size", "medusa_vocab_size"):
        declared = source.config.get(key)
        if declared not in (None, target.vocab_size):
            raise UnsupportedModel(
                f"{source.where}: the heads are for a vocabulary of {declared} tokens, the target "
                f"has {target.vocab_size}; use the target that they were trained for"
            )


def _read_vocabulary(
    source: HeadSource, found: _Found, target: ModelConfig
) -> tuple[int, Tensor | None]:
    declared = source.config.get("truncated_vocab_size") or source.config.get("draft_vocab_size")
    ids: Tensor | None
    if "token_map" in found.maps:
        size, ids = read_ids(source, found.maps["token_map"], target.vocab_size)
    else:
        size = _draft_vocab_size(source, found, target)
        ids = read_offsets(source, found.maps.get("d2t"), size, target.vocab_size)
    if declared not in (None, size):
        raise ModelFileError(
            f"{source.where}: config.json says a draft vocabulary of {declared!r} tokens, the "
            f"files hold {size}"
        )
    return size, ids


def _draft_vocab_size(source: HeadSource, found: _Found, target: ModelConfig) -> int:
    if "d2t" in found.maps:
        shape = source.shape(found.maps["d2t"])
        return shape[0] if shape else 0
    outs = [name for ours, name in found.stored.items() if ours.endswith("out.weight")]
    rows = source.shape(outs[0])[0] if outs and source.shape(outs[0]) else target.vocab_size
    if rows != target.vocab_size:
        raise UnsupportedModel(
            f"{source.where}: the heads project to {rows} tokens, the target has "
            f"{target.vocab_size}, and no token_map or d2t says which ones; use the target that "
            "they were trained for"
        )
    return rows


def _miscounted(source: HeadSource, num_heads: int) -> tuple[str, ...]:
    for key in _COUNTS:
        declared = source.config.get(key)
        if declared not in (None, num_heads):
            return (f"config.json says {key}={declared}, the files hold {num_heads} heads",)
    return ()
