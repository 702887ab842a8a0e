"""From logits to tokens: filters, noise, samples, and the rules that accept drafts."""

from .acceptance import accept_block, accept_samples, accept_tokens
from .filters import FilterParams, bad_rows, filtered_probs, filtered_weights
from .noise import Stream, uniforms
from .sampler import sample_from_probs, sample_tokens

__all__ = [
    "FilterParams",
    "Stream",
    "accept_block",
    "accept_samples",
    "accept_tokens",
    "bad_rows",
    "filtered_probs",
    "filtered_weights",
    "sample_from_probs",
    "sample_tokens",
    "uniforms",
]
