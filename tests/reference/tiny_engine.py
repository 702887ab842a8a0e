"""A tiny real model on disk, and a bench that drives an `EngineCore` step by step in this thread.

After every step the bench has the engine check its books: no block leaked, no table wrong.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from forerun.config import EngineConfig, SpeculationConfig
from forerun.draft.base import Drafter, NoDrafter
from forerun.engine.core import EngineCore
from forerun.engine.intake import Intake
from forerun.engine.request import Request
from forerun.engine.results import Stream
from forerun.engine.setup import make_codec, set_up
from forerun.engine.stats import RequestStats
from forerun.model.loader import open_model
from forerun.params import SamplingParams
from forerun.sampling import Chooser, choose_by_drafts
from forerun.types import FinishReason, TokenEvent

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content']"
    " + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
TEXTS = [
    "the quick brown fox jumps over the lazy dog and the other dogs bark at the fox",
    "der Bär läuft über die Straße; 你好世界, привет мир; naïve café 🙂",
    "def add(a, b): return a + b  # and again: def add(a, b): return a + b",
]


def save_tiny_model(
    folder: Path,
    *,
    vocab_size: int | None = None,  # None: that of the tokenizer and four ids without text
    head_size: int = 16,
    num_layers: int = 2,
    eos: Sequence[int] | None = None,
    spread: float = 0.35,
    habit: float = 0.0,  # how strongly a token calls for its successor: makes text repeat itself
    max_positions: int = 512,
    seed: int = 0,
) -> Path:
    """Write a random Llama with a byte-level tokenizer in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = vocab_size or tokenizer.get_vocab_size() + 4
    hidden, heads, kv_heads, inner = 64, 4, 2, 96
    end = tokenizer.token_to_id("<|end|>")
    config = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": [id for id in (eos or [end]) if id < vocab_size],
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    shapes = {"model.embed_tokens.weight": (vocab_size, hidden)}
    for index in range(num_layers):
        base = f"model.layers.{index}."
        shapes |= {
            base + "self_attn.q_proj.weight": (heads * head_size, hidden),
            base + "self_attn.k_proj.weight": (kv_heads * head_size, hidden),
            base + "self_attn.v_proj.weight": (kv_heads * head_size, hidden),
            base + "self_attn.o_proj.weight": (hidden, heads * head_size),
            base + "mlp.gate_proj.weight": (inner, hidden),
            base + "mlp.up_proj.weight": (inner, hidden),
            base + "mlp.down_proj.weight": (hidden, inner),
        }
    shapes["lm_head.weight"] = (vocab_size, hidden)
    dice = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=dice) * spread for name, shape in shapes.items()}
    if habit:
        for name in [name for name in weights if "o_proj" in name or "down_proj" in name]:
            weights[name] *= 0.012
    # Successors form cycles of seven tokens.
    ids = torch.arange(vocab_size)
    successors = torch.where((ids + 1) % 7 == 0, ids - 6, (ids + 1).clamp_max(vocab_size - 1))
    weights["lm_head.weight"][successors] += habit * weights["model.embed_tokens.weight"][ids]
    norms = ["model.norm.weight"] + [
        f"model.layers.{index}.{name}.weight"
        for index in range(num_layers)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    weights |= {name: 1 + 0.1 * torch.randn(hidden, generator=dice) for name in norms}
    save_file(weights, folder / "model.safetensors")
    return folder


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE of about three hundred tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=298,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    return tokenizer


@dataclass
class Generated:
    """What the bench saw of one request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    stream: Stream = field(init=False)  # reads the events as callers of the engine do
    events: list[TokenEvent] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def __post_init__(self) -> None:
        self.stream = Stream(self.request)

    @property
    def stats(self) -> RequestStats:
        return self.request.snapshot(0.0)


class Bench:
    """An engine without its thread. Float32 and torch kernels unless told otherwise."""

    def __init__(
        self,
        folder: Path,
        drafter: Drafter | None = None,
        *,
        max_draft: int = 7,
        cache_blocks: int | None = None,
        choose: Chooser = choose_by_drafts,
        **options: object,
    ) -> None:
        defaults = {"dtype": "float32", "kernels": "torch", "block_size": 8, "num_threads": 1}
        options = {"device": "cpu", "max_num_seqs": 16, "max_num_batched_tokens": 256} | options
        options = defaults | options | {"speculation": SpeculationConfig(max_draft=max_draft)}
        if cache_blocks is not None:
            options["kv_cache_tokens"] = cache_blocks * options["block_size"]
        self.files = open_model(folder)
        self.codec = make_codec(self.files)
        self.machinery = set_up(self.files, EngineConfig(**options))
        self.core = EngineCore(
            self.machinery.runner, self.machinery.scheduler, drafter or NoDrafter(), choose
        )
        self.intake = Intake(
            self.codec,
            vocab_size=self.files.config.vocab_size,
            eos_token_ids=self.files.config.eos_token_ids,
            max_model_len=self.machinery.max_model_len,
        )
        self.seen: list[Generated] = []  # by request id
        self.num_steps = 0

    @property
    def pool(self):
        return self.machinery.scheduler._pool

    @property
    def decoder(self):
        return self.machinery.runner.decoder

    def add(self, prompt: Sequence[int], params: SamplingParams) -> Generated:
        """Hand in a request, made as `Engine` makes it."""
        if params.seed is None:
            params = dataclasses.replace(params, seed=0)
        request = self.intake.make(len(self.seen), prompt, params)
        self.seen.append(Generated(request))
        self.core.add(request)
        return self.seen[-1]

    def step(self) -> list[TokenEvent]:
        """Do one step, check the books, note what happened."""
        events = self.core.step()
        self.core.check_integrity()
        self.num_steps += 1
        for event in events:
            self._note(event)
        return events

    def cancel(self, generated: Generated) -> None:
        event = self.core.cancel(generated.request.request_id)
        self.core.check_integrity()
        if event is not None:
            self._note(event)

    def run(self, limit: int = 5000) -> list[Generated]:
        """Step until nothing is left to do; nothing may be held then."""
        for _ in range(limit):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"work left after {limit} steps"
        assert self.pool.num_free == self.pool.num_blocks, "blocks leaked"
        return self.seen

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        before_step: Callable[[int], None] | None = None,
    ) -> list[Generated]:
        """Run a batch to its end."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        fresh = [self.add(*pair) for pair in zip(prompts, each, strict=True)]
        while before_step is not None and self.core.has_work:
            before_step(self.num_steps)
            self.step()
        self.run()
        return fresh

    def _note(self, event: TokenEvent) -> None:
        generated = self.seen[event.request_id]
        assert generated.finish_reason is None, "an event after the last one"
        generated.events.append(event)
        generated.token_ids.extend(event.token_ids)
        generated.pieces.append(generated.stream.take(event).text)
        generated.finish_reason, generated.error = event.finish_reason, event.error
