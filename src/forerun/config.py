"""How the engine is set up. Frozen, validated once, never written again; unknown keys refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from .errors import ConfigError, refuse_unknown

__all__ = ["MAX_DRAFT", "EngineConfig", "SpeculationConfig"]

MAX_DRAFT = 64
LEAST_STORE = 1024  # tokens
STORE_DRAFTERS = ("auto", "suffix")  # who may keep past outputs
ACCEPT_RULES = ("auto", "point_mass", "token", "block")
DRAFT_SAMPLING = ("greedy", "sampled")
MODEL_DRAFTERS = ("draft-model", "eagle", "medusa")  # who runs a network of its own

# The keys that vLLM's users write in --speculative-config, and ours.
VLLM_KEYS = {
    "method": "drafter",
    "num_speculative_tokens": "max_draft",
    "draft_sample_method": "draft_sampling",
}
# Values that they write, by our key.
VLLM_VALUES: Mapping[str, Mapping[str, str]] = {
    "drafter": {"draft_model": "draft-model", "eagle3": "eagle"},
    "draft_sampling": {"probabilistic": "sampled"},
}


class _Strict:
    """Refuse unknown keywords with the nearest known one instead of a bare TypeError."""

    __slots__ = ()

    def __new__(cls, *_: Any, **given: Any) -> Self:
        refuse_unknown(given, (each.name for each in fields(cls)), cls.__name__)  # type: ignore[arg-type]
        return object.__new__(cls)


@dataclass(frozen=True, slots=True)
class SpeculationConfig(_Strict):
    """Which drafter runs ahead, and how far."""

    drafter: str = "auto"  # a registered name; "auto" picks; "none" is plain decoding
    max_draft: int = 15  # most draft tokens per request and step
    accept_rule: str = "auto"  # auto, point_mass, token, block; all are lossless
    model: str | None = None  # draft model or head: a pulled name, a folder, a .gguf file
    draft_sampling: str = "greedy"  # greedy: the likeliest tokens; sampled: drawn from the draft
    draft_trees: bool = True  # whether heads may draft several paths for one pass
    # A fixed tree for Medusa heads: paths of ranks, as published with some; None: the likeliest
    medusa_choices: tuple[tuple[int, ...], ...] | None = None
    prompt_lookup_max: int = 4  # longest suffix that the n-gram drafter looks up, in tokens
    prompt_lookup_min: int = 1  # shortest
    # The suffix drafter may keep outputs for later requests of the same `cache_salt`:
    suffix_store_tokens: int = 0  # most tokens kept over all salts; 0: none
    suffix_store_age_s: int = 3600  # how long
    suffix_store_shared: bool = False  # whether all requests without a salt share a store

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, str):
            raise ConfigError(f"drafter={self.drafter!r} is not the name of a drafter")
        _check_choice("accept_rule", self.accept_rule, ACCEPT_RULES)
        _check_choice("draft_sampling", self.draft_sampling, DRAFT_SAMPLING)
        self._check_model()
        _check_range("max_draft", self.max_draft, 0, MAX_DRAFT)
        _check_range("prompt_lookup_min", self.prompt_lookup_min, 1, 32)
        _check_range("prompt_lookup_max", self.prompt_lookup_max, 1, 32)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} is above "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )
        self._check_store()
        self._check_trees()

    def _check_trees(self) -> None:
        if not isinstance(self.draft_trees, bool):
            raise ConfigError(f"draft_trees={self.draft_trees!r} is not true or false")
        if self.medusa_choices is None:
            return
        if self.drafter not in ("auto", "medusa"):
            raise ConfigError(f"medusa_choices are of no use to drafter={self.drafter!r}")
        try:
            paths = [tuple(path) for path in self.medusa_choices]
            sound = all(type(rank) is int and rank >= 0 for path in paths for rank in path)
        except TypeError:
            sound = False
        if not sound or not paths or not all(paths):
            raise ConfigError(
                f"medusa_choices={self.medusa_choices!r} are not paths of ranks such as "
                "[[0], [1], [0, 0]]"
            )

    def _check_model(self) -> None:
        if self.model is None:
            if self.drafter in MODEL_DRAFTERS:
                raise ConfigError(
                    f"drafter={self.drafter!r} needs a model of its own: model='...', --draft-model"
                )
            return
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model={self.model!r} is not the name or path of a draft model")
        if self.drafter not in ("auto", *MODEL_DRAFTERS):
            raise ConfigError(
                f"model={self.model!r} is of no use to drafter={self.drafter!r}; it is for "
                f"{', '.join(MODEL_DRAFTERS)}"
            )

    def _check_store(self) -> None:
        tokens = self.suffix_store_tokens
        _check_range("suffix_store_tokens", tokens, 0, 1 << 30)
        _check_range("suffix_store_age_s", self.suffix_store_age_s, 1, 1 << 30)
        if not isinstance(self.suffix_store_shared, bool):
            raise ConfigError(
                f"suffix_store_shared={self.suffix_store_shared!r} is not true or false"
            )
        if 0 < tokens < LEAST_STORE:
            raise ConfigError(
                f"suffix_store_tokens={tokens} holds hardly an answer; at least {LEAST_STORE}, or "
                "0 for no store"
            )
        if tokens and self.drafter not in STORE_DRAFTERS:
            raise ConfigError(
                f"suffix_store_tokens={tokens} is of no use to drafter={self.drafter!r}; it is "
                f"for {' and '.join(STORE_DRAFTERS)}"
            )

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SpeculationConfig:
        """Build from a mapping in forerun's or vLLM's key names; unknown keys are refused."""
        if not isinstance(options, Mapping):
            raise ConfigError(f"speculation={options!r} is neither a mapping nor a config")
        known = [each.name for each in fields(cls)]
        refuse_unknown(options, [*known, *VLLM_KEYS], "the speculative config")
        ours = {VLLM_KEYS.get(key, key): value for key, value in options.items()}
        if len(ours) < len(options):
            raise ConfigError("the speculative config names one setting twice, in two spellings")
        for key, meanings in VLLM_VALUES.items():
            if isinstance(ours.get(key), str):
                ours[key] = meanings.get(ours[key], ours[key])
        return cls(**ours)


@dataclass(frozen=True, slots=True)
class EngineConfig(_Strict):
    """How the engine runs a model."""

    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto, bfloat16, float16, float32
    max_model_len: int | None = None  # tokens; None: what the model was trained for, at most 8192
    max_num_seqs: int = 64  # requests that run at once
    max_num_batched_tokens: int = 512  # token budget of a step
    kv_cache_tokens: int | None = None  # None: from the memory at hand
    block_size: int = 32  # positions per cache block
    enable_prefix_caching: bool = True
    num_threads: int | None = None  # None: the processors this process may use
    exact_bits: str = "auto"  # auto, on, off: logits whose bits depend on nothing beside them
    kernels: str = "auto"  # auto, compiled, numba, torch: who computes a pass (model/decoder)
    quantize: str = "none"  # none, int8: weights of fewer bits, which change what the model says
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, ("auto", "bfloat16", "float16", "float32"))
        _check_choice("exact_bits", self.exact_bits, ("auto", "on", "off"))
        _check_choice("kernels", self.kernels, ("auto", "torch", "numba", "compiled"))
        _check_choice("quantize", self.quantize, ("none", "int8"))
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(
                f"enable_prefix_caching={self.enable_prefix_caching!r} is not true or false"
            )
        if not isinstance(self.speculation, SpeculationConfig):
            raise ConfigError(f"speculation={self.speculation!r} is not a SpeculationConfig")
        _check_range("max_num_seqs", self.max_num_seqs, 1, 4096)
        _check_range("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        _check_range("block_size", self.block_size, 1, 1024)
        if self.block_size % 2:
            raise ConfigError(
                f"block_size={self.block_size} is odd; 16-bit caches keep positions in pairs"
            )
        for name in ("max_model_len", "kv_cache_tokens", "num_threads"):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 1, 1 << 40)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is under "
                f"max_num_seqs={self.max_num_seqs}: some request could never take a step"
            )


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} is not an integer")
    if not low <= value <= high:
        raise ConfigError(f"{name}={value} is outside {low}..{high}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(choices)}")
