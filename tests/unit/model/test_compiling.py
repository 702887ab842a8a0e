"""Compiled kernels are kept by a hash of their sources, in forerun's own folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numba

from forerun.home import forerun_home
from forerun.kernels import attention, compiling, pointwise


def test_the_folder_follows_the_sources(tmp_path: Path, monkeypatch) -> None:
    before = compiling.cache_path()
    assert before.parent == forerun_home() / "kernels"
    assert compiling.cache_path() == before
    copies = tmp_path / "kernels"
    copies.mkdir()
    for source in Path(compiling.__file__).parent.glob("*.py"):
        (copies / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(compiling, "__file__", str(copies / "compiling.py"))
    assert compiling.cache_path() == before
    (copies / "tiles.py").write_text("# another tile")
    assert compiling.cache_path() != before


def test_kernels_are_kept_there_and_numbas_setting_is_left_alone() -> None:
    assert not numba.config.CACHE_DIR
    for kernel in (attention.attend, attention.rotate, pointwise.add_norm):
        assert compiling.cache_path() in Path(kernel._cache.cache_path).parents


def test_a_home_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    code = "import forerun.kernels.pointwise as p; print(p.add_norm._cache.cache_path)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"FORERUN_HOME": str(blocked), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(blocked) not in done.stdout
