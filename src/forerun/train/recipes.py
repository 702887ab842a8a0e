"""How heads of each kind are trained: their shape, their first weights, losses and schedules.

Small budgets decide the numbers: a few million weights, some hundred thousand tokens, one machine.
The published recipes (EAGLE 2401.15077, EAGLE-3 2503.01840, Medusa 2401.10774) run far longer at
lower learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..heads.config import EagleConfig, HeadConfig, MedusaConfig
from ..heads.feature_layers import default_layers
from ..model.arch import ModelConfig
from .losses import LOSSES

__all__ = ["KINDS", "Recipe", "default_recipe", "draw_weights", "head_config"]

KINDS = ("eagle", "eagle3", "medusa")
SPREAD = 0.02  # of first weights


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a run does, apart from how long. The same recipe, rows and seed give the same head."""

    kind: str
    seed: int = 0
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5  # longest gradient
    warmup: float = 0.03  # of the run
    batch_tokens: int = 512  # looks of a step, padding included
    num_guesses: int = 3  # learnt for each look, each from one look further back
    decay: float = 0.8  # what each further guess counts, relative to the one before
    loss: str = "cross-entropy"
    feature_weight: float = 0.0  # of the smooth L1 distance to the target's states, EAGLE-1
    noise: float = 0.0  # added to the states that are read, uniform, in their root mean squares
    evaluations: int = 12  # in a run
    patience: int = 4  # evaluations without a better one, after which the run ends
    eval_tokens: int = 8192  # looks of held-out rows

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"a head of kind {self.kind!r}; known: {', '.join(KINDS)}")
        if self.loss not in LOSSES:
            raise ConfigError(f"loss={self.loss!r}; known: {', '.join(LOSSES)}")
        for name in ("batch_tokens", "num_guesses", "evaluations", "patience", "eval_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is under 1")
        if not 0 < self.learning_rate < 1:
            raise ConfigError(f"learning_rate={self.learning_rate} is outside 0..1")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} is negative; it counts from 0")


def default_recipe(kind: str) -> Recipe:
    """Give the recipe of a kind."""
    if kind == "eagle":
        # The paper's weights are 1 and 0.1, its guesses 1: what is drafted deep gains most from
        # the head's having seen its own estimates (HASS). It begins at a fitted map (first_fit),
        # and at 1e-3 the loss rose over the first steps.
        return Recipe(kind, learning_rate=3e-4, feature_weight=0.1, noise=0.1)
    if kind == "medusa":
        return Recipe(kind, num_guesses=4)
    return Recipe(kind)


def head_config(
    kind: str, target: ModelConfig, draft_vocab_size: int, num_heads: int = 4
) -> HeadConfig:
    """Shape a head for a target."""
    if kind == "medusa":
        return MedusaConfig(
            num_heads=num_heads,
            num_blocks=1,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            shared_head=True,
            own_head=True,
            block_bias=True,
        )
    third = kind == "eagle3"
    layer = replace(
        target,
        family="llama",
        num_layers=1,
        sliding_windows=(None,),
        tie_embeddings=False,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
    )
    return EagleConfig(
        generation=3 if third else 1,
        layer=layer,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        feature_layers=_layers(target.num_layers) if third else (),
        fc_bias=not third,
        input_norm=True,  # EAGLE-1's authors have none; not compared here
        output_norm=third,
        norm_before_residual=False,  # as every reader of these files computes it
        norm_before_fc="none",
        norm_output=False,
        own_embeddings=False,
        own_head=third,
    )


def _layers(num_layers: int) -> tuple[int, ...]:
    """Name the layers that an EAGLE-3 head reads; the usual ones need six."""
    return default_layers(num_layers) if num_layers >= 6 else (0, num_layers // 2, num_layers)


def draw_weights(
    net: nn.Module, config: HeadConfig, seed: int, scale: Callable[[str], float], vocabulary: Tensor
) -> None:
    """Draw a head's first weights. `scale` gives the root mean square of what it reads: "tokens"
    (embeddings) and "states"; both shall weigh alike.
    """
    dice = torch.Generator().manual_seed(seed)
    fixed: Mapping[str, Tensor] = {"head.weight": vocabulary, "out.weight": vocabulary}
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name in fixed:
                weight.copy_(fixed[name])
            elif name.endswith(".bias"):
                weight.zero_()
            elif weight.dim() == 1:
                weight.fill_(1.0)
            elif isinstance(config, MedusaConfig):
                weight.zero_()  # each head begins as the target's own guess
            else:
                weight.copy_(torch.randn(weight.shape, generator=dice) * SPREAD)
        if isinstance(config, EagleConfig):
            _even_out(net.get_parameter("fc.weight"), config, scale)


def _even_out(weight: nn.Parameter, config: EagleConfig, scale: Callable[[str], float]) -> None:
    if config.generation == 1:
        size = config.layer.hidden_size
        weight[:, :size] /= max(scale("tokens"), 1e-3)
        weight[:, size:] /= max(scale("states"), 1e-3)
        return
    size = config.target_hidden_size
    for index, layer in enumerate(config.feature_layers):
        weight[:, index * size : (index + 1) * size] /= max(scale(f"layer {layer}"), 1e-3)
