"""From logits to tokens: filters, noise, samples, and the rules that accept drafts."""

from .acceptance import accept_block, accept_samples, accept_tokens
from .adjust import History, TokenCounts, TokenRules, adjust_logits, collect_adjustments
from .filters import FilterParams, bad_rows, filtered_probs, filtered_weights
from .logprobs import processed_logprobs, raw_logprobs, read_logprobs
from .noise import Stream, derive_seed, uniforms
from .rules import RULES, Chooser, Noise, Rule, choose_by_drafts, make_chooser
from .sampler import argmax_and_check, sample_and_check, sample_from_probs, sample_tokens

__all__ = [
    "RULES",
    "Chooser",
    "FilterParams",
    "History",
    "Noise",
    "Rule",
    "Stream",
    "TokenCounts",
    "TokenRules",
    "accept_block",
    "accept_samples",
    "accept_tokens",
    "adjust_logits",
    "argmax_and_check",
    "bad_rows",
    "choose_by_drafts",
    "collect_adjustments",
    "derive_seed",
    "filtered_probs",
    "filtered_weights",
    "make_chooser",
    "processed_logprobs",
    "raw_logprobs",
    "read_logprobs",
    "sample_and_check",
    "sample_from_probs",
    "sample_tokens",
    "uniforms",
]
