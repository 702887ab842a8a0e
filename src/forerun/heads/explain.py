"""A head in words for people: what it is, how big, what it reads, what was noticed."""

from __future__ import annotations

from .config import EagleConfig, Head, MedusaConfig

__all__ = ["explain"]


def explain(head: Head) -> list[str]:
    """Describe a head in a few lines."""
    config = head.config
    num_parameters = sum(weight.numel() for weight in head.weights.values())
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in head.weights.values()})
    lines = _medusa_lines(config) if isinstance(config, MedusaConfig) else _eagle_lines(config)
    lines.append(f"weights: {num_parameters:,} in {', '.join(dtypes)}")
    lines.append(_vocabulary_line(config))
    lines.append(f"made for: {head.verifier or 'not said'}")
    if head.num_speculative_tokens is not None:
        lines.append(f"draft length asked for: {head.num_speculative_tokens}")
    return [*lines, *(f"note: {note}" for note in head.notes)]


def _medusa_lines(config: MedusaConfig) -> list[str]:
    whose = (
        "the target's own"
        if not config.own_head
        else "one for all heads"
        if config.shared_head
        else "one per head"
    )
    return [
        f"kind: Medusa, {config.num_heads} heads of {config.num_blocks} residual blocks",
        f"hidden size: {config.hidden_size}",
        "reads: the target's last hidden state, after its final norm",
        f"vocabulary projection: {whose}",
    ]


def _eagle_lines(config: EagleConfig) -> list[str]:
    layer = config.layer
    if config.generation == 3:
        name = "EAGLE-3.1" if config.norm_output else "EAGLE-3"
        reads = f"the residual stream after layers {', '.join(map(str, config.feature_layers))}"
    else:
        name = "EAGLE-1 (the same weights serve EAGLE-2)"
        reads = "the target's last hidden state, after its final norm"
    norms = {
        "norm before the residual": config.norm_before_residual,
        "one norm before fc": config.norm_before_fc == "one",
        "a norm per input before fc": config.norm_before_fc == "each",
        "output norm": config.output_norm and config.generation == 1,
        "input norm": config.input_norm and config.generation == 1,
    }
    lines = [
        f"kind: {name}, one {layer.family} layer",
        f"sizes: hidden {layer.hidden_size}, feed-forward {layer.intermediate_size}, "
        f"{layer.num_heads} query and {layer.num_kv_heads} key heads of {layer.head_size}",
        f"reads: {reads}",
        f"positions: {layer.max_positions}",
        f"embeddings: {_whose(config.own_embeddings)}; "
        f"vocabulary projection: {_whose(config.own_head)}",
    ]
    chosen = [words for words, on in norms.items() if on]
    return [*lines, f"variant: {', '.join(chosen)}"] if chosen else lines


def _whose(own: bool) -> str:
    return "its own" if own else "the target's own"


def _vocabulary_line(config: EagleConfig | MedusaConfig) -> str:
    if config.draft_vocab_size == config.vocab_size:
        return f"drafts: all {config.vocab_size:,} tokens"
    share = config.draft_vocab_size / config.vocab_size
    return f"drafts: {config.draft_vocab_size:,} of {config.vocab_size:,} tokens ({share:.0%})"
