"""What the machine offers is found out: quotas, processor abilities, devices that do not exist."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from forerun.device import (
    available_cpus,
    choose_device,
    choose_dtype,
    cpu_name,
    has_fast_bf16,
)
from forerun.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "limit"),
    [("max 100000", None), ("150000 100000", 1), ("50000 100000", 1), ("800000 100000", 8)],
)
def test_a_container_quota_is_respected(tmp_path: Path, content: str, limit: int | None) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(content + "\n")
    usable = len(os.sched_getaffinity(0))
    assert available_cpus(quota) == (usable if limit is None else min(usable, limit))


def test_without_a_quota_file_the_affinity_counts(tmp_path: Path) -> None:
    assert available_cpus(tmp_path / "absent") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("name", ["gpu", "tpu:0", "cuda:x", "mps"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        choose_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused_with_the_count() -> None:
    with pytest.raises(ConfigError, match="0 CUDA devices"):
        choose_device("cuda:0")
    assert choose_device("auto") == torch.device("cpu")


def test_dtype_follows_the_hardware() -> None:
    cpu = torch.device("cpu")
    expected = torch.bfloat16 if has_fast_bf16(cpu) else torch.float32
    assert choose_dtype("auto", cpu) is expected
    assert choose_dtype("float16", cpu) is torch.float16


def test_the_processor_is_named_with_its_abilities(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name\t: Some CPU\nflags\t\t: fpu avx2 amx_bf16 sse\n")
    assert cpu_name(info) == "Some CPU (amx_bf16, avx2)"
    assert "unknown" in cpu_name(tmp_path / "absent")
