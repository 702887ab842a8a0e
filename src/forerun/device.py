"""Which device, number format and threads a process should use, found out rather than assumed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from .errors import ConfigError

__all__ = [
    "DTYPES",
    "available_cpus",
    "choose_device",
    "choose_dtype",
    "cpu_name",
    "has_amx",
    "has_fast_bf16",
]

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

_CPUINFO = Path("/proc/cpuinfo")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def choose_device(name: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda` or `cuda:N` into a device that exists here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r} is not one of auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name!r} does not exist: {torch.cuda.device_count()} CUDA devices are visible"
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Turn `auto` into bfloat16 where the hardware computes with it, else float32."""
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if has_fast_bf16(device) else torch.float32


def has_fast_bf16(device: torch.device) -> bool:
    """Say whether the device multiplies bfloat16 natively (AMX, AVX512-BF16, or a recent GPU)."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return bool({"amx_bf16", "avx512_bf16"} & _cpu_flags(_CPUINFO))


def has_amx() -> bool:
    """Say whether the processor multiplies tiles of bfloat16 (Intel AMX)."""
    return "amx_bf16" in _cpu_flags(_CPUINFO)


def available_cpus(quota_file: Path = _CGROUP_QUOTA) -> int:
    """Count the processors that this process may use, a container's quota respected."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = quota_file.read_text().split()
        if quota != "max":
            count = min(count, max(1, math.floor(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no cgroup v2 here: affinity is all there is to know
    return count


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """Name the processor as the operating system does, with what matters to us of its abilities."""
    name = next(
        (
            line.split(":", 1)[1].strip()
            for line in _lines(cpuinfo)
            if line.startswith("model name")
        ),
        "unknown processor",
    )
    notable = sorted({"amx_bf16", "avx512_bf16", "avx512f", "avx2"} & _cpu_flags(cpuinfo))
    return f"{name} ({', '.join(notable) or 'no vector extensions known'})"


def _cpu_flags(cpuinfo: Path) -> set[str]:
    for line in _lines(cpuinfo):
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
