"""What `docs/adding_a_drafter.md` shows is run as it stands there: the class, the call, a name."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from reference.drafter_zoo import Species, ZooBench

from forerun import Engine, SamplingParams, SpeculationConfig
from forerun.draft.base import check_drafter, drafter_names, make_drafter
from forerun.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding_a_drafter.md").read_text()
GREEDY = SamplingParams(temperature=0, max_tokens=32)
SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=32)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def echo(tmp_path, monkeypatch):
    """Install the drafter of the page as a package, under the name that the page gives it."""
    ((group, names),) = tomllib.loads(blocks("toml")[0])["project"]["entry-points"].items()
    ((name, target),) = names.items()
    module, function = target.split(":")
    make = f"\n\ndef {function}(config, setting):\n    return EchoDrafter()\n"
    (tmp_path / f"{module}.py").write_text(blocks("python")[0] + make)
    info = tmp_path / "echo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{group}]\n{name} = {target}\nbroken = {module}:nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(module, None)


def test_the_page_runs_as_it_stands_there(repeating, monkeypatch, capsys):
    example, call = blocks("python")
    assert call.count('"smollm2-135m"') == 1
    scope: dict[str, object] = {}
    exec(example, scope)
    exec(call.replace("smollm2-135m", str(repeating.folder)), scope)
    result = scope["result"]
    assert list(result.token_ids) == plain_tokens(repeating, result.prompt_token_ids)
    assert 0 < result.stats.num_accepted < result.stats.num_drafted
    assert f"{result.stats.num_accepted} of {result.stats.num_drafted}" in capsys.readouterr().out


def plain_tokens(tiny, prompt):
    with Engine.from_pretrained(str(tiny.folder), drafter="none") as engine:
        [result] = engine.generate([list(prompt)], SamplingParams(temperature=0))
    assert result.stats.num_drafted == 0
    return list(result.token_ids)


def test_the_example_is_short():
    [example, _] = blocks("python")
    code = example[example.index("class EchoDrafter") :].splitlines()
    assert len([line for line in code if line.strip()]) <= 30
    assert PAGE.count("\n") < 150


def test_it_is_found_by_name(repeating, echo):
    assert echo in drafter_names()
    with Engine.from_pretrained(str(repeating.folder), drafter=echo, dtype="float32") as engine:
        [result] = engine.generate("one two three one two three one", GREEDY)
    assert result.stats.num_accepted > 0
    with pytest.raises(ConfigError, match="did you mean 'echo'"):
        check_drafter(SpeculationConfig(drafter="ecko"))


def test_one_that_cannot_be_imported_is_refused_in_words(echo):
    with pytest.raises(ConfigError, match=r"'broken' \(echo_drafter:nothing\).*AttributeError"):
        make_drafter(SpeculationConfig(drafter="broken"), None)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_it_conforms(repeating, prompts, echo, params):
    """As the members of the zoo do; the whole of it is theirs to pass."""
    species = Species(echo, lambda drafter: len(drafter._followers) + len(drafter._num_read))
    bench = ZooBench(
        repeating.folder, species, cache_blocks=20, max_model_len=128, max_num_batched_tokens=40
    )
    bench.generate(prompts, params)
    for each, prompt in zip(bench.seen, prompts, strict=True):
        assert tuple(each.token_ids) == repeating.plain(prompt, params).token_ids
        assert each.stats.drafter_faults == {}
    assert sum(each.stats.num_preemptions for each in bench.seen) > 0
    assert bench.num_accepted > 0


def test_the_files_that_the_page_names_exist():
    named = set(re.findall(r"`((?:tests|benchmarks|draft|scripts)/[\w/.]+)`", PAGE))
    named |= set(re.findall(r"`(\w+/[\w/]+\.py)`", PAGE))
    named = {name.split()[0] for name in named}
    assert len(named) >= 6
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "src" / "forerun" / name).exists(), name
    for link in re.findall(r"\]\(([\w.]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
