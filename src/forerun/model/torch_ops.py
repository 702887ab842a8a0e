"""`Ops` in plain torch: any device, any format, all requests of a step at once.

Attention gathers the blocks of a group of requests, padded to one shape (`paged`), and leaves the
rest to torch's own kernels. Everything that depends on a step's numbers is planned on the host, so
nothing here waits for a device, and a pass can be captured and run again over other numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from ..cache.kv_cache import KVCache
from ..types import ForwardInput, TreeRows
from .ops import AttentionShape, Rotary
from .paged import Group, PassPlan, plan_pass

__all__ = ["TorchOps"]


class TorchOps:
    """The contract of `ops`. A step's tensors may lie on the host, whatever the device."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._pass: _Pass | None = None

    def prepare(self, step: ForwardInput, cache: KVCache) -> None:
        shape = cache.shape
        width = shape.num_kv_heads * shape.head_size
        self.follow(plan_pass(step, shape.block_size, width, cache.keys.device), cache)

    def follow(self, plan: PassPlan, cache: KVCache) -> None:
        """Prepare for a pass that somebody else has planned."""
        self._pass = _Pass(
            cache=cache,
            plan=plan,
            cos=self._rotary.cos[plan.positions].unsqueeze(1),
            sin=self._rotary.sin[plan.positions].unsqueeze(1),
            groups=tuple(_Attending.of(group, cache, plan.tree) for group in plan.groups),
        )

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return scaled.to(x.dtype) * weight

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        x += y
        return self.norm(x, weight, eps)

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def attend(self, layer: int, shape: AttentionShape, qkv: Tensor) -> Tensor:
        now = self._pass
        assert now is not None, "prepare() comes first"
        num_tokens, size, groups = qkv.shape[0], shape.head_size, shape.num_kv_heads
        heads = qkv.view(num_tokens, -1, size)  # [N, H + 2G, D]
        queries, keys, values = heads.split([shape.num_heads, groups, groups], dim=1)
        if shape.q_norm is not None and shape.k_norm is not None:
            queries = self.norm(queries, shape.q_norm, shape.norm_eps)
            keys = self.norm(keys, shape.k_norm, shape.norm_eps)
        queries, keys = now.rotate(queries), now.rotate(keys)
        now.cache.write(layer, now.plan.blocks, now.plan.offsets, keys, values)
        mixed = [
            group.attend(queries, now.cache.keys[layer], now.cache.values[layer], shape.window)
            for group in now.groups
        ]  # each [P * T, H, D]
        together = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return together[now.plan.places].view(num_tokens, -1)


@dataclass(frozen=True, slots=True)
class _Pass:
    cache: KVCache
    plan: PassPlan
    cos: Tensor  # [N, 1, D / 2]
    sin: Tensor
    groups: tuple[_Attending, ...]

    def rotate(self, heads: Tensor) -> Tensor:  # [N, heads, D] -> the same
        first, second = heads.float().chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(rotated, dim=-1).to(heads.dtype)


@dataclass(frozen=True, slots=True)
class _Attending:
    """A group of pieces, and what all layers share of its attention. L is W * block_size."""

    group: Group
    seen: Tensor  # [L] int64, positions
    counts: Tensor  # [P, L] bool, positions that the piece holds
    zero: Tensor  # one, in the cache's format
    tree: TreeRows | None
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)  # by window, share

    @staticmethod
    def of(group: Group, cache: KVCache, tree: TreeRows | None) -> _Attending:
        length = group.tables.shape[1] * cache.shape.block_size
        seen = torch.arange(length, device=group.rows.device)
        counts = seen < group.lengths.unsqueeze(1)
        return _Attending(group, seen, counts, cache.keys.new_zeros(()), tree)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Attend over one layer's cache: [N, H, D] -> [P * T, H, D]."""
        num_pieces, num_rows = self.group.rows.shape
        num_heads, size = queries.shape[1:]
        all_keys, all_values = self._gather(keys, values)  # [P, G, L, D]
        groups = all_keys.shape[1]
        share = num_heads // groups
        # Heads that share keys are rows of one head: no kernel needs to know of grouped heads.
        folded = queries[self.group.rows].view(num_pieces, num_rows, groups, share, size)
        folded = folded.permute(0, 2, 3, 1, 4).reshape(num_pieces, groups, share * num_rows, size)
        mixed = functional.scaled_dot_product_attention(
            folded, all_keys, all_values, attn_mask=self._mask(window, share)
        )  # [P, G, share * T, D]
        mixed = mixed.view(num_pieces, groups, share, num_rows, size).permute(0, 3, 1, 2, 4)
        return mixed.reshape(num_pieces * num_rows, num_heads, size)

    def _gather(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Read the pieces' blocks: two [P, G, L, D], zero where nothing counts.

        What lies there may be NaN, and neither a score of -inf nor a weight of zero undoes that.
        """
        num_pieces, num_blocks = self.group.tables.shape
        block = len(self.seen) // num_blocks
        found = keys[self.group.tables]  # [P, W, G, D / pack, block, pack]
        groups, parts, pack = found.shape[2], found.shape[3], found.shape[5]
        counts = self.counts.view(num_pieces, 1, num_blocks, block, 1, 1)
        all_keys = self._keep(counts, found.permute(0, 2, 1, 4, 3, 5))  # [.., block, D/pack, pack]
        found = values[self.group.tables]  # [P, W, G, block / pack, D, pack]
        counts = self.counts.view(num_pieces, 1, num_blocks, block // pack, pack, 1)
        all_values = self._keep(counts, found.permute(0, 2, 1, 3, 5, 4))  # [.., pack, D]
        wide = (num_pieces, groups, len(self.seen), parts * pack)
        return all_keys.view(wide), all_values.view(wide)

    def _keep(self, counts: Tensor, found: Tensor) -> Tensor:
        """Copy what counts into rows that lie as their shape says, zeros for the rest."""
        kept = torch.empty(found.shape, dtype=found.dtype, device=found.device)
        return torch.where(counts, found, self.zero, out=kept)

    def _mask(self, window: int | None, share: int) -> Tensor:
        """Say where rows may look: [P, 1, share * T, L] bool, every row somewhere."""
        known = self.masks.get((window, share))
        if known is not None:
            return known
        positions = self.group.positions.unsqueeze(-1)  # [P, T, 1]
        mask = self.seen <= positions
        if window is not None:
            mask &= self.seen > positions - window
        if self.tree is not None:
            mask = self._see_paths(mask, self.tree, window)
        mask = mask.repeat(1, share, 1).unsqueeze(1)  # rows of a head follow those of the last
        self.masks[window, share] = mask
        return mask

    def _see_paths(self, mask: Tensor, tree: TreeRows, window: int | None) -> Tensor:
        """Have rows see, from where their trees branch, the places of their own paths alone."""
        rows, positions = self.group.rows, self.group.positions.unsqueeze(-1)
        branch_at, paths = tree.branch_at[rows].unsqueeze(-1), tree.paths[rows]  # [P, T, 1 or D]
        mask = mask & (self.seen < branch_at)
        path_positions = branch_at + torch.arange(paths.shape[-1], device=paths.device)
        own = path_positions <= positions
        if window is not None:
            own &= path_positions > positions - window
        # Where several write to one place, one that counts must not be undone: add, do not set.
        found = torch.zeros(mask.shape, dtype=torch.int32, device=mask.device)
        found.scatter_add_(-1, paths, own.int())
        return mask | (found > 0)
