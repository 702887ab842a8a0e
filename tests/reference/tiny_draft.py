"""Tiny pairs of target and draft model: equal, shaken, of another vocabulary; and their bench.

A *reciter* says one text over and over, whatever its vocabulary is: each token calls for the one
that follows it in the text, whose characters all differ. So models of different vocabularies agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from reference.plain import PlainLlama
from reference.tiny_engine import Bench, save_tiny_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from forerun.config import SpeculationConfig
from forerun.draft.base import make_drafter
from forerun.draft.model import DraftModelDrafter
from forerun.engine.core import EngineCore
from forerun.sampling import Chooser, choose_by_drafts
from forerun.types import DraftRequest, Proposal, RequestOutcome

TEXT = " abcdefghijklmnopqrstuvwxyz0123456789éλ你"


class Watched:
    """A drafter, and what it was asked and proposed: (tokens then, draft) of every request."""

    def __init__(self, inner: DraftModelDrafter) -> None:
        self.inner = inner
        self.abilities = inner.abilities
        self.seen: list[tuple[DraftRequest, list[int], list[int]]] = []

    def start(self, request: DraftRequest) -> None:
        self.inner.start(request)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        proposal = self.inner.propose(requests)
        for request, row, length in zip(
            requests, proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True
        ):
            self.seen.append((request, list(request.tokens), row[:length]))
        return proposal

    def observe(self, outcomes: Sequence[RequestOutcome], features: object) -> None:
        self.inner.observe(outcomes, None)

    def finish(self, request_id: int) -> None:
        self.inner.finish(request_id)


class DraftBench(Bench):
    """A bench whose drafter is the one that the configuration names: a draft model."""

    def __init__(
        self,
        folder: Path,
        draft: Path,
        *,
        max_draft: int = 5,
        draft_sampling: str = "greedy",
        choose: Chooser = choose_by_drafts,
        **options: object,
    ) -> None:
        super().__init__(folder, max_draft=max_draft, **options)
        config = SpeculationConfig(
            drafter="draft-model",
            model=str(draft),
            max_draft=max_draft,
            draft_sampling=draft_sampling,
        )
        drafter = make_drafter(config, self.machinery.setting)
        assert isinstance(drafter, DraftModelDrafter)
        self.drafter = drafter
        self.watched = Watched(drafter)
        self.core = EngineCore(
            self.machinery.runner, self.machinery.scheduler, self.watched, choose
        )

    def step(self):
        events = super().step()
        self.drafter.cache.check_integrity()
        return events

    def run(self, limit: int = 5000):
        seen = super().run(limit)
        assert self.drafter.cache.num_free == self.drafter.cache.num_blocks, "draft blocks leaked"
        assert not self.drafter._followers
        return seen

    @property
    def drafted(self) -> int:
        return sum(each.stats.num_drafted for each in self.seen)

    @property
    def accepted(self) -> int:
        return sum(each.stats.num_accepted for each in self.seen)


def greedy_loop(model: PlainLlama, tokens: Sequence[int], count: int) -> list[int]:
    """The slow twin of a greedy draft: everything anew for every token."""
    tokens = list(tokens)
    for _ in range(count):
        row = torch.tensor(model.next_logits(tokens))
        tokens.append(int(row.argmax()))
    return tokens[len(tokens) - count :]


def change_weights(folder: Path, change) -> None:
    """Pass a model's weights through a function of (name, tensor)."""
    path = folder / "model.safetensors"
    weights = {name: change(name, tensor) for name, tensor in load_file(path).items()}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)


def save_shaken(folder: Path, like: Path, amount: float) -> Path:
    """Write a model that is nearly another one."""
    folder.mkdir(parents=True)
    for path in like.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    dice = torch.Generator().manual_seed(7)

    def shake(name: str, weight: Tensor) -> Tensor:
        return weight * (1 + amount * torch.randn(weight.shape, generator=dice))

    change_weights(folder, shake)
    return folder


def save_permuted(folder: Path, like: Path, keep: int | None = None) -> Path:
    """Write a model that is another one but for its ids, which are the other's backwards.

    `keep` leaves so many of the other's merged tokens out: the ones with the highest ids.
    """
    folder.mkdir(parents=True)
    for path in like.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    described = json.loads((like / "tokenizer.json").read_text())
    config = json.loads((like / "config.json").read_text())
    vocab = described["model"]["vocab"]
    plain = sorted(vocab.values())
    # Added tokens follow the others, and padding follows them.
    last = [id for id in range(config["vocab_size"]) if id not in plain]
    order = [*reversed(plain[:keep]), *last]
    place = {old: new for new, old in enumerate(order)}
    kept = {token: place[id] for token, id in vocab.items() if id in place}
    described["model"]["vocab"] = kept
    described["model"]["merges"] = [
        pair for pair in described["model"]["merges"] if _joined(pair) in kept
    ]
    for each in described["added_tokens"]:
        each["id"] = place[each["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    config |= {
        "vocab_size": len(order),
        "eos_token_id": [place[id] for id in config["eos_token_id"]],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    change_weights(folder, lambda name, weight: weight[order] if name in tables else weight)
    return folder


def _joined(pair: str | Sequence[str]) -> str:
    return "".join(pair.split(" ") if isinstance(pair, str) else pair)


def make_tokenizer(words: Sequence[str], specials: Sequence[str] = ("<|end|>",)) -> Tokenizer:
    """Make a byte-level tokenizer with a token for each byte and each beginning of `words`."""
    spell = {byte: letter for letter, byte in _letters().items()}
    vocab = {
        letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    merges = []
    for word in words:
        letters = [spell[byte] for byte in word.encode()]
        for end in range(1, len(letters)):
            pair = ("".join(letters[:end]), letters[end])
            if "".join(pair) not in vocab:
                vocab["".join(pair)] = len(vocab)
                merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def _letters() -> Mapping[str, int]:
    """GPT-2's letter for each byte."""
    from forerun.text.vocabulary import _GPT2_BYTES

    return _GPT2_BYTES


def save_reciter(folder: Path, tokenizer: Tokenizer, text: str = TEXT, **options) -> Path:
    """Write a model that recites a text."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(set(ids)) == len(ids), "each token must have one follower"
    size = tokenizer.get_vocab_size()
    save_tiny_model(folder, vocab_size=size, eos=[size - 1], num_layers=1, **options)
    tokenizer.save(str(folder / "tokenizer.json"))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    followers = dict(zip(ids, [*ids[1:], ids[0]], strict=True))

    def recite(name: str, weight: Tensor) -> Tensor:
        if "o_proj" in name or "down_proj" in name:
            return weight * 0.01
        if name == "lm_head.weight":
            weight = weight * 0.1
            for token, follower in followers.items():
                weight[follower] += embedding[token]
        return weight

    change_weights(folder, recite)
    return folder
