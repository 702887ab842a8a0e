"""What the source of a server must not contain, read from its syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import forerun

SOURCE = Path(forerun.__file__).parent
# The one place where processes are started, and what is sent to them: our own data, by us.
TRIALS = {"grammar/trials.py", "grammar/trial.py"}
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "subprocess"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"), ("os", "system"), ("os", "popen"), ("os", "execv"), ("yaml", "load"),
    ("jit", "load"), ("numpy", "load"), ("np", "load"), ("pickle", "loads"), ("pickle", "load"),
}  # fmt: skip


# Makes safetensors of what others have pickled, for the command line alone; the weights-only reader
# of torch, which its tests give pickles that run code.
CONVERTS = "heads/convert.py"


def files(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders or ("",):
        for path in sorted((SOURCE / folder).rglob("*.py")):
            yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text())


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield node.lineno, each.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.split(".")[0]


def test_nothing_reads_pickles_or_runs_code() -> None:
    found = []
    for name, tree in files():
        if name in TRIALS or name == CONVERTS:
            continue
        found += [f"{name}:{line} imports {what}" for line, what in imported(tree)
                  if what in FORBIDDEN_IMPORTS - {"subprocess"}]  # fmt: skip
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            if isinstance(function, ast.Name) and function.id in FORBIDDEN_CALLS:
                found.append(f"{name}:{node.lineno} calls {function.id}")
            if isinstance(function, ast.Attribute):
                owner = function.value
                last = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                if (last, function.attr) in FORBIDDEN_ATTRIBUTES:
                    found.append(f"{name}:{node.lineno} calls {last}.{function.attr}")
    assert not found


def test_what_converts_pickles_reads_weights_only_and_nobody_else_uses_it() -> None:
    tree = ast.parse((SOURCE / CONVERTS).read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert len(calls) == 1
    options = {each.arg: ast.unparse(each.value) for each in calls[0].keywords}
    assert options["weights_only"] == "True"
    unpickling = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [each for each in unpickling if each.startswith("pickle.")]
    users = [
        name
        for name, other in files()
        if any(
            isinstance(node, ast.ImportFrom) and (node.module or "").endswith("heads.convert")
            for node in ast.walk(other)
        )
    ]
    assert users == ["cli/convert.py"]


@pytest.mark.parametrize("folder", ["server", "engine", "text", "sampling", "draft"])
def test_server_and_engine_start_no_processes(folder: str) -> None:
    found = [
        f"{name}:{line}" for name, tree in files(folder) for line, what in imported(tree)
        if what in ("subprocess", "multiprocessing", "pty")
    ]  # fmt: skip
    assert not found


def test_no_remote_code_is_ever_trusted() -> None:
    found = [
        f"{name}:{node.value.lineno}"
        for name, tree in files()
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]  # fmt: skip
    assert not found


def test_the_server_fetches_nothing() -> None:
    """S10: no client library in what serves; so no URL of a request can be followed."""
    clients = {"requests", "httpx", "urllib", "aiohttp", "urllib3", "ftplib", "socket"}
    found = [
        f"{name}:{line} imports {what}"
        for name, tree in files("server", "engine", "text", "grammar", "sampling", "draft")
        for line, what in imported(tree) if what in clients
    ]  # fmt: skip
    assert not found


def test_the_server_checks_nothing_by_assert() -> None:
    """S12: python -O drops asserts. Those that remain narrow types or state what we guarantee."""
    found = []
    for name, tree in files("server"):
        found += [
            f"{name}:{node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.Assert)
        ]
    # Those of tools state what their callers guarantee (a table's shape, a checked choice, a
    # parser's protocol); metrics narrow a union. None looks at what came in.
    allowed = ("server/tools/", "server/metrics.py")
    assert [each for each in found if not each.startswith(allowed)] == []


def test_no_bare_except_swallows_what_ends_a_block() -> None:
    """`TimeIsUp` and cancellation are BaseExceptions: whoever catches these ends a thread, or hands
    them on."""
    allowed = {"engine/loop.py", "engine/engine.py", "grammar/compiler.py", "text/time_limit.py"}
    found = []
    for name, tree in files("server", "text", "engine", "grammar"):
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler) or name in allowed:
                continue
            kind = node.type
            if kind is None or (isinstance(kind, ast.Name) and kind.id == "BaseException"):
                found.append(f"{name}:{node.lineno}")
    assert not found


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for path in (SOURCE / "server" / "dashboard").iterdir():
        if path.suffix in (".html", ".css", ".js", ".svg"):
            text = path.read_text().replace("http://www.w3.org/", "")
            assert "http://" not in text, path
            assert "https://" not in text, path
        if path.suffix == ".js":
            for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
                assert word not in text, f"{word} in {path}"
        if path.suffix == ".html":
            assert "<script>" not in text
            assert " onclick" not in text
            assert " style=" not in text
