"""Tiny random checkpoints as transformers writes them, and a harness that runs our decoder on them.

Weights are drawn wide, norms and biases included: attention must be far from uniform, or a test
of positions and windows could not fail. The harness hands every request scattered blocks that
hold finite rubbish, in a cache whose other blocks hold NaN: what leaks is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from forerun.cache.kv_cache import KVCache
from forerun.model.arch import ModelConfig
from forerun.model.decoder import Decoder, load_decoder
from forerun.model.weights import WeightSource
from forerun.types import ForwardInput

VOCAB = 160
GAIN = 1.4  # standard deviation of a linear layer's outputs; transformers' own draw gives about 0.2
CLASSES: Mapping[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def save_tiny_model(folder: Path, family: str, *, seed: int = 0, **options: Any) -> Any:
    """Write a random checkpoint to `folder`; return transformers' own float32 model of it."""
    config_class, model_class = CLASSES[family]
    config = config_class(**{**SIZES, **options}, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.3 * noise)
            elif weight.dim() == 1:  # a bias
                weight.copy_(noise)
            else:
                weight.copy_(noise * (GAIN / weight.shape[1] ** 0.5))
    model.save_pretrained(folder)
    vocab = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return model


def random_prompt(length: int, seed: int, vocab: int = VOCAB) -> list[int]:
    """Draw a prompt of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (length,), generator=generator).tolist()


@torch.no_grad()
def reference_logits(model: Any, prompt: Sequence[int]) -> Tensor:  # -> [T, V]
    """Compute all rows of logits with transformers, whole and without a cache."""
    logits: Tensor = model(torch.tensor([list(prompt)]), use_cache=False).logits[0].float()
    return logits


def make_decoder(
    config: ModelConfig, weights: WeightSource, kernels: str, dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Decoder:  # fmt: skip
    """Build a CPU decoder."""
    return load_decoder(
        config, weights, device=torch.device("cpu"), dtype=dtype, kernels=kernels, **options
    )


class Altered:
    """A weight source whose tensors pass through a function first: `change(name, tensor)`."""

    def __init__(self, source: WeightSource, change: Callable[[str, Tensor], Tensor]) -> None:
        self._source = source
        self._change = change

    @property
    def names(self) -> frozenset[str]:
        return self._source.names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.read(name).shape)

    def dtype(self, name: str) -> str:
        return self._source.dtype(name)

    def read(self, name: str) -> Tensor:
        return self._change(name, self._source.read(name))

    def close(self) -> None:
        self._source.close()


class Harness:
    """A decoder with a cache of its own; requests live at scattered blocks until it goes away."""

    def __init__(
        self, decoder: Decoder, num_blocks: int, *, block_size: int = 32, seed: int = 0
    ) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.cache = KVCache(decoder.cache_shape(block_size), num_blocks, decoder.device)
        self.cache.keys.fill_(torch.nan)
        self.cache.values.fill_(torch.nan)
        self._generator = torch.Generator().manual_seed(seed)
        # Block 0 stays nobody's: it is what tables are padded with.
        free = 1 + torch.randperm(num_blocks - 1, generator=self._generator)
        self._free: list[int] = free.tolist()

    def blocks_for(self, length: int) -> list[int]:
        """Take blocks for `length` positions, filled with finite rubbish."""
        count = -(-length // self.block_size)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the harness's cache is too small"
        for tensor in (self.cache.keys, self.cache.values):
            shape = tensor[:, taken].shape
            tensor[:, taken] = (torch.randn(shape, generator=self._generator) * 50).to(tensor.dtype)
        return taken

    def step(
        self,
        parts: Sequence[tuple[Sequence[int], int, Sequence[int]]],
        logit_rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Run one pass over parts (tokens, first position, blocks): logits of all rows, or some."""
        token_ids = [token for tokens, _, _ in parts for token in tokens]
        positions = [start + i for tokens, start, _ in parts for i in range(len(tokens))]
        starts = [0]
        for tokens, _, _ in parts:
            starts.append(starts[-1] + len(tokens))
        width = max(len(blocks) for _, _, blocks in parts)
        tables = [[*blocks, *[0] * (width - len(blocks))] for _, _, blocks in parts]
        rows = range(len(token_ids)) if logit_rows is None else logit_rows
        step = ForwardInput(
            num_fine=len(token_ids),
            num_sampling_rows=len(rows),
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            starts=torch.tensor(starts),
            block_tables=torch.tensor(tables),
            logit_rows=torch.tensor(list(rows), dtype=torch.int64),
        )
        return self.decoder.forward(step, self.cache)


def run_decoder(
    decoder: Decoder,
    requests: Sequence[Sequence[int]],
    chunks: Sequence[int] | None = None,
    *,
    block_size: int = 32,
    seed: int = 0,
) -> list[Tensor]:
    """Run requests as one ragged batch, in chunks, to the end: all logits [T, V] of each.

    Request b takes chunks of `chunks[b], chunks[b + 1], ...` (a cycle), so that a step mixes
    sizes and positions; None takes each prompt whole.
    """
    num_blocks = 2 + 2 * sum(-(-len(tokens) // block_size) for tokens in requests)
    harness = Harness(decoder, num_blocks, block_size=block_size, seed=seed)
    tables = [harness.blocks_for(len(tokens)) for tokens in requests]
    plans = [
        list(_cut(len(tokens), [len(tokens)] if chunks is None else _turned(chunks, index)))
        for index, tokens in enumerate(requests)
    ]
    found: list[list[Tensor]] = [[] for _ in requests]
    for turn in range(max(map(len, plans))):
        active = [index for index, plan in enumerate(plans) if turn < len(plan)]
        spans = [plans[index][turn] for index in active]
        logits = harness.step(
            [
                (requests[index][first:end], first, tables[index])
                for index, (first, end) in zip(active, spans, strict=True)
            ]
        )
        sizes = [end - first for first, end in spans]
        for index, rows in zip(active, logits.split(sizes), strict=True):
            found[index].append(rows)
    return [torch.cat(rows) for rows in found]


def _turned(chunks: Sequence[int], by: int) -> list[int]:
    return [*chunks[by % len(chunks) :], *chunks[: by % len(chunks)]]


def _cut(length: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    first, turn = 0, 0
    while first < length:
        end = min(length, first + sizes[turn % len(sizes)])
        yield first, end
        first, turn = end, turn + 1
