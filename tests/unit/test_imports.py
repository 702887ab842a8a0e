"""Imports point one way, files stay small, and the package exports what it says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import forerun
import forerun.errors

SOURCE = Path(forerun.__file__).parent

# Who stands on whom. A part may import itself and what stands below it.
LAYERS = [
    {
        *("_version", "errors", "types", "config", "constraint", "params", "device", "home"),
        "kernels",
    },
    {"cache", "sampling", "text", "grammar", "fetch", "model", "registry"},
    {"heads"},
    {"draft"},
    {"engine"},
    {"server", "measure", "train"},
    {"cli", "__main__", "__init__"},
]
# Within a layer parts are siblings that do not know each other, with these exceptions.
SIBLINGS = {
    ("model", "cache"),  # attention writes the cache
    ("registry", "fetch"),  # models by name are fetched
    ("registry", "model"),  # and converted
    ("kernels", "home"),  # where compiled kernels are kept
    ("config", "errors"),
    ("constraint", "errors"),
    ("params", "constraint"),
    ("grammar", "text"),  # what bytes a token stands for
    ("params", "errors"),
    ("types", "params"),  # what the target is asked for, as drafters see it
    ("device", "errors"),
    ("__main__", "cli"),
    ("cli", "_version"),
    ("__init__", "_version"),
}
MAX_LINES = 400


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """List the top-level parts of forerun that a file imports, wherever in it it does."""
    depth = len(path.relative_to(SOURCE).parts)
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level == depth:  # from the package itself
                names = [node.module] if node.module else [each.name for each in node.names]
                parts.update(name.split(".")[0] for name in names)
            elif node.level == 0 and (node.module or "").split(".")[0] == "forerun":
                names = (node.module or "").split(".")[1:2] or [each.name for each in node.names]
                parts.update(names)
        elif isinstance(node, ast.Import):
            for each in node.names:
                assert each.name.split(".")[0] != "forerun", f"{path} imports forerun by full name"
    return parts


def layer_of(part: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if part in layer)


def test_every_part_has_a_layer() -> None:
    known = set().union(*LAYERS)
    assert {part_of(path) for path in modules()} <= known


def test_imports_point_one_way() -> None:
    wrong = []
    for path in modules():
        part = part_of(path)
        for other in imported_parts(path) - {part}:
            downwards = layer_of(other) < layer_of(part)
            if not downwards and (part, other) not in SIBLINGS:
                wrong.append(f"{path.relative_to(SOURCE)} imports {other}")
    assert not wrong


def test_the_import_test_sees_imports() -> None:
    assert {"draft", "sampling", "types", "errors"} <= imported_parts(SOURCE / "engine" / "core.py")
    assert "model" in imported_parts(SOURCE / "engine" / "setup.py")
    assert "cache" in imported_parts(SOURCE / "model" / "decoder.py")


def test_files_hold_one_idea() -> None:
    for path in modules():
        text = path.read_text()
        assert text.count("\n") <= MAX_LINES, f"{path} has outgrown its idea"
        assert ast.get_docstring(ast.parse(text)), f"{path} does not say what it is"


def test_the_package_exports_what_it_says() -> None:
    assert set(forerun.__all__) == {*forerun._HOMES, "__version__"}
    for name in forerun.__all__:
        assert getattr(forerun, name) is not None
    with pytest.raises(AttributeError, match="Engin"):
        forerun.Engin  # noqa: B018


def test_starting_the_program_loads_no_torch() -> None:
    code = "import sys, forerun.cli; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_error_tree_is_the_one_that_is_drawn() -> None:
    drawn = forerun.errors.__doc__ or ""
    classes = [
        value
        for value in vars(forerun.errors).values()
        if isinstance(value, type) and issubclass(value, forerun.ForerunError)
    ]
    assert len(classes) > 10
    for each in classes:
        assert each.__name__ in drawn, f"{each.__name__} is missing from the tree"
        assert each.__name__ in forerun.errors.__all__
