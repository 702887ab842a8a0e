"""Slow twin of generation: the whole sequence anew for every token, one request, no speculation.

A Llama in thirty lines of plain torch, float32. No cache, no batch, no chunk; filters are the slow
twin's, the cut at a stop is done on the whole text. Of the package it uses only the noise, which
is a definition, and a codec to decode with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from reference.filters_slow import filtered_row
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from forerun.params import SamplingParams
from forerun.sampling import Stream, uniforms
from forerun.text import TextCodec


class PlainLlama:
    """The model of a folder, evaluated from scratch. Rows are remembered, since tests repeat."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self._weights = {name: weight.float() for name, weight in weights.items()}
        self._rows: dict[tuple[int, ...], list[float]] = {}

    @property
    def _head_size(self) -> int:
        c = self.config
        return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    def next_logits(self, tokens: Sequence[int]) -> list[float]:
        """Compute the logits of the token after `tokens`."""
        key = tuple(tokens)
        if key not in self._rows:
            self._rows[key] = self.logits(key)[-1].tolist()
        return self._rows[key]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:  # -> [T, V]
        c, w = self.config, self._weights
        size = self._head_size
        x = w["model.embed_tokens.weight"][torch.tensor(tokens)]  # [T, E]
        cos, sin = self._rotation(len(tokens))
        mask = torch.ones(len(tokens), len(tokens)).tril().log()  # 0 or -inf
        for layer in range(c["num_hidden_layers"]):
            base = f"model.layers.{layer}."
            h = self._norm(x, w[base + "input_layernorm.weight"])

            def heads(name: str, h: Tensor = h, base: str = base) -> Tensor:  # -> [heads, T, D]
                y = h @ w[f"{base}self_attn.{name}.weight"].T
                return y.view(len(tokens), -1, size).transpose(0, 1)

            q, k, v = heads("q_proj"), heads("k_proj"), heads("v_proj")
            q, k = (y * cos + torch.cat([-y[..., size // 2 :], y[..., : size // 2]], -1) * sin
                    for y in (q, k))  # fmt: skip
            share = c["num_attention_heads"] // c["num_key_value_heads"]
            k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
            weights = (q @ k.transpose(1, 2) / math.sqrt(size) + mask).softmax(-1)
            mixed = (weights @ v).transpose(0, 1).reshape(len(tokens), -1)
            x = x + mixed @ w[base + "self_attn.o_proj.weight"].T
            h = self._norm(x, w[base + "post_attention_layernorm.weight"])
            gate = functional.silu(h @ w[base + "mlp.gate_proj.weight"].T)
            inner = gate * (h @ w[base + "mlp.up_proj.weight"].T)
            x = x + inner @ w[base + "mlp.down_proj.weight"].T
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])  # tied, or its own
        return self._norm(x, w["model.norm.weight"]) @ head.T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * weight

    def _rotation(self, count: int) -> tuple[Tensor, Tensor]:  # 2 x [T, D]
        size = self._head_size
        steps = self.config["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(count).float(), steps).repeat(1, 2)
        return angles.cos(), angles.sin()


@dataclass(frozen=True)
class Plain:
    """What plain decoding gives."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


def generate(
    model: PlainLlama,
    codec: TextCodec,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos: Sequence[int] = (),
    max_model_len: int = 1 << 30,
) -> Plain:
    """Continue a prompt, one full evaluation a token."""
    tokens, output = list(prompt), []
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    while True:
        token = next_token(model, tokens, params)
        tokens.append(token)
        output.append(token)
        if token in stop_ids:
            return Plain(tuple(output), codec.decode(output[:-1]), "stop")
        cut = first_stop(codec.decode(output), params.stop_strings)
        if cut is not None:
            return Plain(tuple(output), cut, "stop")
        if len(output) == params.max_tokens or len(tokens) == max_model_len:
            return Plain(tuple(output), codec.decode(output), "length")


def next_token(model: PlainLlama, tokens: Sequence[int], params: SamplingParams) -> int:
    """Draw the token at position len(tokens)."""
    probs = next_probs(model, tokens, params)
    if params.temperature == 0:
        return probs.index(1.0)
    assert params.seed is not None, "the twin needs a seed"
    where = np.array([len(tokens)], np.int64)
    point = float(uniforms(np.array([params.seed], np.uint64), where, Stream.TARGET)[0])
    running = 0.0
    for token, p in enumerate(probs):
        running += p
        if point < running:
            return token
    return max(token for token, p in enumerate(probs) if p > 0)


def next_probs(model: PlainLlama, tokens: Sequence[int], params: SamplingParams) -> list[float]:
    """Compute the distribution of the token at position len(tokens)."""
    row = model.next_logits(tokens)
    return filtered_row(row, params.temperature, params.top_k, params.top_p, params.min_p).probs


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Cut the text before the stop string that is completed first, of equals the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return None
    end, length = min(ends)
    return text[: end + length]
