"""EAGLE and Medusa heads written from their definitions, whole sequences at once, no cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from forerun.heads.config import EagleConfig, Head, MedusaConfig, expected_shapes
from forerun.model.arch import rope_frequencies


def random_head(config: EagleConfig | MedusaConfig, seed: int = 0, draft_ids=None) -> Head:
    """Make a head of random weights: norms near one, matrices small."""
    dice = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=dice)
        is_norm = "norm" in name
        weights[name] = 1 + 0.1 * noise if is_norm else noise * (0.1 if "bias" in name else 0.2)
    return Head(config, weights, draft_ids, None, None, ())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def eagle_rows(
    head: Head, embedded: Tensor, states: Tensor, positions: Tensor, mask: Tensor, first: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run rows that see each other as `mask` [N, N] says: (layer states, their norms, read rows).

    `states` [N, ...] is a list: the target's (wide) where `first`, else the head's own.
    """
    c, w, layer = head.config, head.weights, head.config.layer
    eps, size = layer.norm_eps, layer.hidden_size
    rows, residuals = [], []
    for e, s, is_first in zip(embedded, states, first, strict=True):
        if c.generation == 1:
            g = functional.linear(torch.cat([e, s]), w["fc.weight"], w.get("fc.bias"))
            rows.append(rms_norm(g, w["input_norm.weight"], eps) if c.input_norm else g)
            residuals.append(g)
            continue
        if is_first:
            if c.norm_before_fc == "one":
                s = rms_norm(s, w["fc_norm.weight"], eps)
            elif c.norm_before_fc == "each":
                parts = s.split(c.target_hidden_size)
                s = torch.cat(
                    [rms_norm(p, w[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)]
                )
            s = functional.linear(s, w["fc.weight"], w.get("fc.bias"))
        n = rms_norm(s, w["hidden_norm.weight"], eps)
        rows.append(torch.cat([rms_norm(e, w["embed_norm.weight"], eps), n]))
        residuals.append(n if c.norm_before_residual else s)
    read, x = torch.stack(rows), torch.stack(residuals)
    heads, groups, width = layer.num_heads, layer.num_kv_heads, layer.head_size

    def project(name: str, count: int) -> Tensor:  # [N, count, D]
        y = functional.linear(read, w[f"layer.{name}.weight"], w.get(f"layer.{name}.bias"))
        return y.view(len(read), count, width)

    q, k, v = project("q", heads), project("k", groups), project("v", groups)
    if layer.qk_norm:
        q = rms_norm(q, w["layer.q_norm.weight"], eps)
        k = rms_norm(k, w["layer.k_norm.weight"], eps)
    angles = torch.outer(positions.float(), rope_frequencies(layer).float())
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)

    def turn(y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = turn(q), turn(k)
    k, v = (each.repeat_interleave(heads // groups, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / width**0.5
    scores = scores.masked_fill(~mask, -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(read), -1)
    x = x + functional.linear(mixed, w["layer.o.weight"], w.get("layer.o.bias"))
    h = rms_norm(x, w["layer.mlp_norm.weight"], eps)
    gate = functional.silu(functional.linear(h, w["layer.gate.weight"]))
    x = x + functional.linear(
        gate * functional.linear(h, w["layer.up.weight"]), w["layer.down.weight"]
    )
    assert x.shape == (len(read), size)
    normed = rms_norm(x, w["norm.weight"], eps) if c.output_norm else x
    return (normed if c.norm_output else x), normed, read


def medusa_rows(head: Head, x: Tensor) -> list[Tensor]:
    """Run every head's blocks over rows [N, E]."""
    c, w = head.config, head.weights
    results = []
    for i in range(c.num_heads):
        y = x
        for j in range(c.num_blocks):
            base = f"heads.{i}.blocks.{j}"
            z = functional.linear(y, w[f"{base}.weight"], w.get(f"{base}.bias"))
            y = y + functional.silu(z)
        results.append(y)
    return results
