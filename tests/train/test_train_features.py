"""Features on disk are the target's own states, however rows were packed and runs broken off."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from train_tools import logits_of, random_rows

from forerun.cache.kv_cache import KVCache
from forerun.errors import ConfigError
from forerun.model.decoder import KEY_BLOCK
from forerun.train import features
from forerun.train.features import FeatureProgress, compute_features, open_features
from forerun.train.target import Target, load_target
from forerun.types import FeatureSpec, ForwardInput


@pytest.fixture(scope="module")
def target(chatty: Path) -> Target:
    return load_target(str(chatty), num_threads=1, device="cpu")


def states_alone(target: Target, tokens: list[int], layers: tuple[int, ...]):
    decoder = target.decoder
    cache = KVCache(decoder.cache_shape(KEY_BLOCK), -(-len(tokens) // KEY_BLOCK), decoder.device)
    step = ForwardInput.of_one_request(torch.tensor(tokens), 0, KEY_BLOCK)
    return decoder.forward_with_states(step, cache, FeatureSpec(layers, final=True))[1]


@pytest.mark.parametrize("layers", [(), (0, 1, 2)])
@pytest.mark.parametrize("pass_tokens", [1024, 16])  # 16: several passes, and long rows in pieces
def test_they_are_the_targets_states_and_labels(
    target: Target, tmp_path: Path, monkeypatch, layers: tuple[int, ...], pass_tokens: int
) -> None:
    monkeypatch.setattr(features, "PASS_TOKENS", pass_tokens)
    rows = [*random_rows(5), *random_rows(7, 1, (40, 60))[5:]]
    store = open_features(tmp_path, target, layers)
    compute_features(target, rows, store)
    assert len(store) == 7
    for row in rows:
        tokens = [*row.prompt_ids, *row.answer_ids]
        found, expected = store.read(row.id), states_alone(target, tokens, layers)
        torch.testing.assert_close(found.final.float(), expected.final, rtol=2e-3, atol=2e-3)
        for layer in layers:
            kept = found.layers[layer].float()
            torch.testing.assert_close(kept, expected.layers[layer], rtol=1e-2, atol=1e-2)
        begin = len(row.prompt_ids) - 1
        logits = logits_of(target, tokens)[begin:-1]
        torch.testing.assert_close(found.log_sums, logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
        assert found.tops.tolist() == logits.argmax(-1).tolist()
        assert len(found.tops) == len(row.answer_ids)


def test_a_broken_run_goes_on_and_tells_its_size_first(target: Target, tmp_path: Path) -> None:
    rows = random_rows(12)
    whole = open_features(tmp_path / "whole", target, (1,))
    compute_features(target, rows, whole)
    part = open_features(tmp_path / "part", target, (1,))
    compute_features(target, rows[:5], part)
    folder = tmp_path / "part" / "features-1"
    for name in ("final.bin", "layer_1.bin", "tops.bin", "index.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b"[7, 7")  # what a killed run leaves
    told: list[FeatureProgress] = []
    part = open_features(tmp_path / "part", target, (1,))
    assert len(part) == 5
    compute_features(target, rows, part, told.append)
    sizes = [len(row.prompt_ids) + len(row.answer_ids) for row in rows]
    assert told[0].tokens_per_s is None
    assert told[0].num_positions == sum(sizes[:5])
    assert told[0].total_bytes == sum(sizes) * 2 * 2 * target.config.hidden_size
    assert told[-1].num_positions == told[-1].total_positions == sum(sizes)
    for row in rows:
        one, other = whole.read(row.id), part.read(row.id)
        torch.testing.assert_close(one.final, other.final, rtol=2e-3, atol=2e-3)
        assert one.tops.tolist() == other.tops.tolist()
    assert (folder / "final.bin").stat().st_size == sum(sizes) * 2 * target.config.hidden_size


def test_features_of_another_model_or_a_cut_file_are_refused(
    target: Target, tmp_path: Path
) -> None:
    store = open_features(tmp_path, target, ())
    compute_features(target, random_rows(3), store)
    folder = tmp_path / "features-final"
    meta = (folder / "meta.json").read_text()
    (folder / "meta.json").write_text(meta.replace(target.fingerprint, "another"))
    with pytest.raises(ConfigError, match="another model"):
        open_features(tmp_path, target, ())
    (folder / "meta.json").write_text(meta)
    with (folder / "final.bin").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(ConfigError, match="10 bytes"):
        open_features(tmp_path, target, ())


def test_rows_of_another_model_are_refused(target: Target, tmp_path: Path) -> None:
    rows = [dataclasses.replace(random_rows(1)[0], answer_ids=(5, 49_000))]
    with pytest.raises(ConfigError, match="token 49000"):
        compute_features(target, rows, open_features(tmp_path, target, ()))
