"""The draft vocabulary: which of the target's tokens a head can propose, in its own order.

Files hold offsets, `d2t`: draft token i is the target's token i + d2t[i]; it is not the id itself.
Beside it lies `t2d`, a mask over the target's vocabulary, which readers can do without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ModelFileError
from .source import HeadSource

__all__ = ["check_mask", "mask_of", "offsets_of", "read_ids", "read_offsets"]

_INTEGERS = ("I64", "I32")
_SHOWN = 3


def offsets_of(ids: Tensor) -> Tensor:  # [D] -> [D] int64
    """Spell ids as `d2t` holds them."""
    return ids - torch.arange(len(ids))


def mask_of(ids: Tensor, vocab_size: int) -> Tensor:  # [D] -> [V] bool
    """Spell ids as `t2d` holds them."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return mask


def read_offsets(
    source: HeadSource, name: str | None, draft_vocab_size: int, vocab_size: int
) -> Tensor | None:
    """Read the ids [D] from offsets; None where both vocabularies are the same.

    Raises:
        ModelFileError: they are missing, out of range, not one-to-one, or of another length.
    """
    if name is None:
        if draft_vocab_size != vocab_size:
            raise ModelFileError(
                f"{source.where}: the head drafts {draft_vocab_size} of {vocab_size} tokens, and "
                "d2t, which says which ones, is missing"
            )
        return None
    offsets = _read_integers(source, name, draft_vocab_size)
    ids = offsets + torch.arange(draft_vocab_size)
    hint = "; d2t holds offsets from each draft id, not the target's ids"
    _check_ids(source, name, ids, vocab_size, hint)
    return _unless_all(source, name, ids, vocab_size)


def read_ids(source: HeadSource, name: str, vocab_size: int) -> tuple[int, Tensor | None]:
    """Read ids [D] that a file holds as such (`token_map`), and how many; see `read_offsets`."""
    shape = source.shape(name)
    ids = _read_integers(source, name, shape[0] if shape else 0)
    _check_ids(source, name, ids, vocab_size, "")
    return len(ids), _unless_all(source, name, ids, vocab_size)


def _unless_all(source: HeadSource, name: str, ids: Tensor, vocab_size: int) -> Tensor | None:
    if len(ids) < vocab_size:
        return ids
    if not torch.equal(ids, torch.arange(vocab_size)):
        raise ModelFileError(
            f"{source.where}: {name} reorders all {vocab_size} tokens; a head that drafts every "
            "token has them in the target's order"
        )
    return None


def check_mask(source: HeadSource, name: str | None, ids: Tensor | None) -> tuple[str, ...]:
    """Hold the mask, where there is one, against the ids; say so if they differ."""
    if name is None or ids is None or source.dtype(name) not in ("BOOL", "U8"):
        return ()
    mask = source.read(name).bool()
    if mask.dim() == 1 and torch.equal(mask.nonzero().flatten(), ids.sort().values):
        return ()
    return (f"{name} marks other tokens than d2t names; d2t was taken",)


def _read_integers(source: HeadSource, name: str, length: int) -> Tensor:
    if source.dtype(name) not in _INTEGERS or source.shape(name) != (length,):
        raise ModelFileError(
            f"{source.where}: {name} is {source.dtype(name)} {list(source.shape(name))}, expected "
            f"I64 [{length}]"
        )
    return source.read(name).to(torch.int64)


def _check_ids(source: HeadSource, name: str, ids: Tensor, vocab_size: int, hint: str) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ModelFileError(
            f"{source.where}: {name} names {len(outside)} tokens outside 0..{vocab_size - 1}, "
            f"among them {outside[:_SHOWN].tolist()}{hint}"
        )
    unique, counts = ids.unique(return_counts=True)
    twice = unique[counts > 1]
    if len(twice):
        raise ModelFileError(
            f"{source.where}: {name} names {len(twice)} tokens more than once, among them "
            f"{twice[:_SHOWN].tolist()}{hint}"
        )
