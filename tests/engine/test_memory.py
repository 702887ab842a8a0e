"""What cannot fit is refused before it is loaded, with the sum and the way out."""

from __future__ import annotations

import re

import pytest
import torch
from reference.tiny_engine import Bench

from forerun.engine import memory
from forerun.errors import CapacityError

CPU = torch.device("cpu")


def write(tmp_path, *, free_kib=None, limit=None, used=0, cached=0):
    meminfo = tmp_path / "meminfo"
    if free_kib is not None:
        meminfo.write_text(f"MemTotal: 999 kB\nMemAvailable:  {free_kib} kB\nBuffers: 1 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 7\n")
    return memory.available_bytes(CPU, meminfo, tmp_path)


def test_what_is_free_is_the_least_of_machine_and_container(tmp_path):
    assert write(tmp_path) is None
    assert write(tmp_path, free_kib=1000) == 1024_000
    assert write(tmp_path, limit="max") == 1024_000
    assert write(tmp_path, limit=900_000, used=500_000, cached=100_000) == 500_000
    assert write(tmp_path, limit=9_000_000, used=500_000) == 1024_000


def test_a_model_that_cannot_fit_is_refused_before_it_is_read(tiny, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(
        "forerun.engine.setup.load_decoder", lambda *_, **__: pytest.fail("it was loaded")
    )
    with pytest.raises(CapacityError, match="max_model_len") as caught:
        Bench(tiny.folder)
    whole, free, weights, cache, workspace = map(
        int, re.findall(r"\d+(?= |,|\.)", str(caught.value))[:5]
    )
    assert free == 1
    assert abs(whole - weights - cache - workspace) <= 2


def test_smaller_settings_need_less(tiny_compiled):
    sums = []
    for options in (
        {"kv_cache_tokens": 4096},
        {"max_num_batched_tokens": 64, "kv_cache_tokens": 4096},
        {"max_num_batched_tokens": 64, "kv_cache_tokens": 512},
        {"max_num_batched_tokens": 64, "kv_cache_tokens": 512, "quantize": "int8"},
    ):
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "require", lambda needs, *_: seen.append(needs))  # noqa: B023
            Bench(tiny_compiled.folder, kernels="auto", block_size=32, **options)
        sums.append(seen[0].total)
    assert sums == sorted(sums, reverse=True)
    assert len(set(sums)) == len(sums)


def test_the_sum_is_near_what_is_taken(tiny_compiled):
    """The weights' share is exactly what lies in memory, but for biases and padding."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "require", lambda needs, *_: seen.append(needs))
        bench = Bench(tiny_compiled.folder, kernels="compiled", block_size=32)
    weights = bench.decoder._weights
    taken = sum(each.nbytes for each in (weights.qkv, weights.out, weights.gate_up, weights.down))
    taken += weights.embedding.nbytes
    taken += 0 if weights.head is weights.embedding else weights.head.nbytes
    assert abs(seen[0].weights / taken - 1) < 0.05
