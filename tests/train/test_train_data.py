"""A run adds whole batches to a folder; one that was killed ends with the same rows."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.errors import ConfigError, UnsupportedModel
from forerun.train import data as data_module
from forerun.train import prompts as prompts_module
from forerun.train.__main__ import describe, main
from forerun.train.data import DataSettings, make_rows
from forerun.train.rows import META_FILE, ROWS_FILE, read_rows

SETTINGS = DataSettings(batch=16, max_answer=30, max_prompt=24, seed=1)
NUM_TOKENS = 1000


class Killed(BaseException):
    """What ends a run in these tests."""


@pytest.fixture(scope="module", autouse=True)
def _short_texts_will_do():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts_module, "MIN_TEXT_CHARS", 10)
        yield


@pytest.fixture(scope="module")
def run(engine, chatty):
    def go(folder: Path, **options):
        options = {"num_tokens": NUM_TOKENS, "settings": SETTINGS, "model": str(chatty)} | options
        return make_rows(engine, folder, **options)

    return go


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory) -> Path:
    """The folder of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "rows"
    run(folder)
    return folder


def test_rows_are_complete_and_differ(whole: Path) -> None:
    rows = read_rows(whole)
    assert sum(len(row.answer_ids) for row in rows) >= NUM_TOKENS
    assert len({row.id // SETTINGS.batch for row in rows}) >= 3
    ids = [row.id for row in rows]
    assert ids == sorted(set(ids))
    assert len({row.prompt_ids for row in rows}) == len(rows)
    assert {row.source for row in rows} == {"written", "about_text", "follow_up"}


def test_progress_announces_then_tells(run, tmp_path: Path) -> None:
    told = []
    end = run(tmp_path / "a", report=told.append)
    first = told[0]
    assert (first.num_rows, first.tokens_per_s, first.remaining_s) == (0, None, None)
    assert first.expected_rows > 0
    assert first.expected_bytes > 0
    assert told[-1] == end
    assert end.is_done
    rows = read_rows(tmp_path / "a")
    assert end.num_rows == end.expected_rows == len(rows)
    assert end.num_tokens == sum(len(row.answer_ids) for row in rows)
    assert end.num_bytes == (tmp_path / "a" / ROWS_FILE).stat().st_size
    assert end.remaining_s == 0
    counts = [each.num_rows for each in told]
    assert counts == sorted(counts)
    last_id = rows[-1].id // SETTINGS.batch * SETTINGS.batch + SETTINGS.batch
    assert end.num_rows + sum(end.dropped.values()) == last_id
    assert "to make" in describe(first)
    assert describe(end).startswith("done: ")


@pytest.mark.parametrize("part", [0.0, 0.001, 0.2, 0.37, 0.5, 0.83, 0.999, 1.0])
def test_a_run_cut_anywhere_ends_the_same(run, whole: Path, tmp_path: Path, part: float) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(whole, folder)
    rows = (folder / ROWS_FILE).read_bytes()
    (folder / ROWS_FILE).write_bytes(rows[: int(part * len(rows))])
    run(folder)
    assert (folder / ROWS_FILE).read_bytes() == rows


@pytest.mark.parametrize("where", ["write_prompts", "answer_prompts", "append_rows"])
def test_a_run_killed_in_its_third_batch_goes_on(
    run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    usual = getattr(data_module, where)
    calls = []

    def dies(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            raise Killed
        return usual(*args, **options)

    monkeypatch.setattr(data_module, where, dies)
    with pytest.raises(Killed):
        run(tmp_path)
    assert 0 < len(read_rows(tmp_path)) < len(read_rows(whole))
    monkeypatch.undo()
    run(tmp_path)
    assert (tmp_path / ROWS_FILE).read_bytes() == (whole / ROWS_FILE).read_bytes()


def test_more_tokens_go_on_from_there(run, whole: Path, tmp_path: Path) -> None:
    run(tmp_path, num_tokens=NUM_TOKENS // 3)
    short = (tmp_path / ROWS_FILE).read_bytes()
    run(tmp_path)
    rows = (tmp_path / ROWS_FILE).read_bytes()
    assert rows == (whole / ROWS_FILE).read_bytes()
    assert rows.startswith(short)
    assert len(short) < len(rows)


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"max_answer": 31}, {"batch": 8}, {"prompt_temperature": 1.0}]
)
def test_other_settings_are_refused(run, whole: Path, change) -> None:
    before = (whole / ROWS_FILE).read_bytes()
    with pytest.raises(ConfigError, match=f"{next(iter(change))} was"):
        run(whole, settings=replace(SETTINGS, **change))
    assert (whole / ROWS_FILE).read_bytes() == before


def test_another_model_is_refused(run, plain_engine, plain: Path, whole: Path) -> None:
    with pytest.raises(ConfigError, match="chat_template was"):
        make_rows(plain_engine, whole, num_tokens=NUM_TOKENS, settings=SETTINGS, model=str(plain))


def test_meta_says_what_made_the_rows(whole: Path) -> None:
    meta = json.loads((whole / META_FILE).read_text())
    assert meta["settings"]["seed"] == SETTINGS.seed
    assert {"model", "max_model_len", "chat_template", "format"} <= set(meta["settings"])
    assert {"forerun", "torch", "processor", "dtype", "model_name"} <= set(meta["made_with"])


def test_time_ends_a_run_between_batches(run, whole: Path, tmp_path: Path) -> None:
    end = run(tmp_path, max_s=0.0)
    assert end.num_rows == 0
    assert end.is_done
    run(tmp_path)
    assert (tmp_path / ROWS_FILE).read_bytes() == (whole / ROWS_FILE).read_bytes()


def test_a_model_without_a_template(plain_engine, plain: Path, tmp_path: Path) -> None:
    make_rows(plain_engine, tmp_path, num_tokens=300, settings=SETTINGS, model=str(plain))
    rows = read_rows(tmp_path)
    assert {row.source for row in rows} == {"written"}
    assert all(row.messages == () for row in rows)


def test_given_prompts_are_answered_once_each(run, tmp_path: Path) -> None:
    prompts = [
        f"the {word} and the dog {number}." for word in ("fox", "sun") for number in range(9)
    ]
    lines = [json.dumps({"prompt": each}) for each in [*prompts, prompts[0], "xyz" * 400]]
    file = tmp_path / "given.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    end = run(tmp_path / "rows", data=file, num_tokens=10**6)
    rows = read_rows(tmp_path / "rows")
    assert [row.messages[-1]["content"] for row in rows] == prompts
    assert {row.source for row in rows} == {"given"}
    assert end.dropped == {"known": 1, "too long": 1}
    before = (tmp_path / "rows" / ROWS_FILE).read_bytes()
    (tmp_path / "rows" / ROWS_FILE).write_bytes(before[: len(before) // 2])
    run(tmp_path / "rows", data=file, num_tokens=10**6)
    assert (tmp_path / "rows" / ROWS_FILE).read_bytes() == before
    file.write_text(lines[0], encoding="utf-8")
    with pytest.raises(ConfigError, match="data was"):
        run(tmp_path / "rows", data=file)


def test_bad_data_leaves_no_folder(run, tmp_path: Path) -> None:
    file = tmp_path / "given.jsonl"
    file.write_text("[]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1"):
        run(tmp_path / "rows", data=file)
    assert not (tmp_path / "rows").exists()


def test_a_model_that_writes_nothing_of_use_is_given_up(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "fault_of", lambda text, num_tokens: "not text")
    with pytest.raises(UnsupportedModel, match=r"last 96 tries.*96 not text"):
        run(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"max_answer": 0}, {"max_prompt": -1}, {"seed": -1}]
)
def test_bad_settings_are_refused(wrong) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DataSettings(**wrong)


def test_the_command_writes_rows_and_names_mistakes(
    chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows"
    file = tmp_path / "given.jsonl"
    file.write_text('{"prompt": "the fox."}\n{"prompt": "the dog."}\n')
    command = ["data", "--model", str(chatty), "--out", str(out), "--tokens", "40"]
    assert main([*command, "--data", str(file), "--hours", "1"]) == 0
    assert len(read_rows(out)) == 2
    assert capsys.readouterr().out.splitlines()[-1].startswith("done: ")
    assert main([*command, "--data", str(file), "--seed", "5"]) == 2
    assert "seed was 0, is 5" in capsys.readouterr().err
