"""From rows on disk to a draft head on disk: features, vocabulary, training, files."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..heads.config import EagleConfig, Head, HeadConfig
from ..heads.loader import open_head
from ..heads.writer import save_head
from .card import Card, write_card
from .costs import measure_costs
from .examples import Batch, make_batch, plan_batches, usable
from .feature_store import FeatureStore
from .features import FeatureProgress, compute_features, open_features
from .first_fit import fit_fc
from .loop import Limits, Trained, TrainingData, TrainProgress, train
from .net import make_net
from .recipes import Recipe, draw_weights, head_config
from .rows import Row, read_rows, split_rows
from .target import Target
from .vocabulary import choose_draft_ids, coverage, single_bytes

__all__ = ["HeadReport", "check_out", "run_folder", "take_rows", "train_head"]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
DRAFT_TOKENS = 4  # that the files advise


@dataclass(frozen=True, slots=True)
class HeadReport:
    """Whom to tell what; each may be left out."""

    features: Callable[[FeatureProgress], None] = lambda progress: None
    training: Callable[[TrainProgress], None] = lambda progress: None
    note: Callable[[str], None] = lambda line: None


def train_head(
    target: Target,
    rows_folder: Path,
    out: Path,
    recipe: Recipe,
    limits: Limits,
    *,
    draft_vocab_size: int = 8192,
    num_tokens: int | None = None,
    resume: Path | None = None,
    command: str = "",
    report: HeadReport | None = None,
) -> Trained:
    """Train a head on rows and write it to the new folder `out`, a model card beside it.

    `num_tokens` takes the first rows with so many answer tokens; None: all. `resume` is a head
    that goes on learning, on these rows. The run itself lies in `run_folder(out)`, from which the
    same call goes on if it was killed.

    Raises:
        ConfigError: there is something at `out`, or rows, settings or head do not fit.
    """
    report = report or HeadReport()
    check_out(out)
    known = read_rows(rows_folder)
    rows = usable(take_rows(known, num_tokens))
    learn, held_out = split_rows(rows)
    if not learn or not held_out:
        raise ConfigError(
            f"{rows_folder}: {len(rows)} rows, {len(held_out)} of them to judge by, are too few; "
            "make more (some hundred are a start)"
        )
    begun = None if resume is None else open_head(resume, target.config)
    # Words are counted in all rows there are: that costs nothing, and few rows know few words.
    config, draft_ids = _shape(target, split_rows(known)[0], recipe, draft_vocab_size, begun)
    layers: tuple[int, ...] = ()
    if isinstance(config, EagleConfig):
        layers = config.feature_layers
    else:
        recipe = dataclasses.replace(recipe, num_guesses=config.num_heads)
    store = open_features(rows_folder, target, sorted(set(layers)))
    compute_features(target, rows, store, report.features)
    decoder = target.decoder

    def batch(some: Sequence[Row]) -> Batch:
        return make_batch(some, store, layers, decoder.embed)

    ids = torch.arange(target.config.vocab_size) if draft_ids is None else draft_ids
    vocabulary = decoder.head_rows(ids).float().cpu()
    data = TrainingData(learn, held_out, batch, vocabulary, draft_ids)
    net = make_net(config)
    if begun is None:
        scale = _scales(target, store, learn)
        assert isinstance(net, nn.Module), "a module, to those who draw"
        draw_weights(net, config, recipe.seed, scale, vocabulary)
        if isinstance(config, EagleConfig) and config.generation == 1:
            plan = plan_batches(learn, recipe.batch_tokens, None)
            fit_fc(net, (batch([learn[i] for i in indexes]) for indexes in plan))
    else:
        net.load_state_dict({name: each.float() for name, each in begun.weights.items()})
    report.note(
        f"{sum(p.numel() for _, p in net.named_parameters() if p.requires_grad) / 1e6:.1f} M "
        f"weights learn from {sum(len(row.answer_ids) for row in learn):,} answer tokens in "
        f"{len(learn):,} rows; {len(held_out):,} rows judge; a draft vocabulary of {len(ids):,} "
        f"tokens holds {coverage(held_out, draft_ids):.1%} of their text"
    )
    identity = _identity(target, recipe, limits, rows, draft_ids, resume)
    done = train(net, data, recipe, limits, run_folder(out), identity, report.training)
    head = Head(
        config=config,
        weights={name: each.to(torch.float32) for name, each in done.weights.items()},
        draft_ids=draft_ids,
        verifier=target.name,
        num_speculative_tokens=DRAFT_TOKENS,
        notes=(),
    )
    save(head, out, target)
    costs = measure_costs(head, target)
    write_card(
        out,
        Card(
            target=target,
            head=head,
            recipe=recipe,
            done=done,
            costs=costs,
            command=command,
            num_rows=len(learn),
            num_tokens=sum(len(row.answer_ids) for row in learn),
            num_held_out=len(held_out),
            coverage=coverage(held_out, draft_ids),
        ),
    )
    return done


def save(head: Head, out: Path, target: Target) -> None:
    """Write a head in bfloat16, half the size. Its card judges float32 weights."""
    small = {name: each.to(torch.bfloat16) for name, each in head.weights.items()}
    save_head(
        dataclasses.replace(head, weights=small),
        out,
        verifier=target.name,
        num_speculative_tokens=DRAFT_TOKENS,
        architectures=[ARCHITECTURES[target.config.family]],
    )


def check_out(out: Path) -> None:
    """Refuse a folder that the head could not be written to, before hours are spent on it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; name another folder or remove it")


def run_folder(out: Path) -> Path:
    """Name the folder in which the run to a head lies."""
    return out.with_name(f"{out.name}.run")


def take_rows(rows: Sequence[Row], num_tokens: int | None) -> list[Row]:
    """Take the first rows whose answers have `num_tokens` tokens together."""
    if num_tokens is None:
        return list(rows)
    taken: list[Row] = []
    count = 0
    for row in rows:
        if count >= num_tokens:
            break
        taken.append(row)
        count += len(row.answer_ids)
    return taken


def _shape(
    target: Target, rows: Sequence[Row], recipe: Recipe, draft_vocab_size: int, begun: Head | None
) -> tuple[HeadConfig, Tensor | None]:
    if begun is not None:
        kind = "medusa"
        if isinstance(begun.config, EagleConfig):
            kind = "eagle" if begun.config.generation == 1 else "eagle3"
        if kind != recipe.kind:
            raise ConfigError(f"the head to go on with is of kind {kind}, not {recipe.kind}")
        return begun.config, begun.draft_ids
    size = min(draft_vocab_size, target.config.vocab_size)
    always = [*single_bytes(target.tokens), *target.config.eos_token_ids]
    draft_ids = choose_draft_ids(rows, size, target.config.vocab_size, always)
    return head_config(recipe.kind, target.config, size, recipe.num_guesses), draft_ids


def _scales(target: Target, store: FeatureStore, rows: Sequence[Row]) -> Callable[[str], float]:
    """Measure the root mean squares of what heads read, on some rows."""
    some = [store.read(row.id) for row in rows[:16]]
    ids = torch.tensor([token for row in rows[:16] for token in row.answer_ids])
    parts = {"tokens": target.decoder.embed(ids).float()}
    parts["states"] = torch.cat([each.final.float() for each in some])
    for layer in store.layers:
        parts[f"layer {layer}"] = torch.cat([each.layers[layer].float() for each in some])
    # The median position: first tokens' states are outliers that say nothing.
    found = {k: float(each.square().mean(-1).sqrt().median()) for k, each in parts.items()}
    return found.__getitem__


def _identity(
    target: Target,
    recipe: Recipe,
    limits: Limits,
    rows: Sequence[Row],
    draft_ids: Tensor | None,
    resume: Path | None,
) -> Mapping[str, Any]:
    """Say what decides over the outcome of a run."""
    told = repr([(row.id, row.prompt_ids, row.answer_ids) for row in rows])
    told += repr(None if draft_ids is None else draft_ids.tolist())
    return {
        **dataclasses.asdict(recipe),
        **dataclasses.asdict(limits),
        "target": target.fingerprint,
        "rows": hashlib.sha256(told.encode()).hexdigest()[:16],
        "resume": None if resume is None else str(resume),
    }
