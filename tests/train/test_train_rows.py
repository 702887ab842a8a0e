"""Rows on disk: whole or not there, on one side for ever, of one setting a folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.train.rows import (
    META_FILE,
    ROWS_FILE,
    Row,
    append_rows,
    claim_folder,
    drop_torn_line,
    is_held_out,
    keep_meta,
    read_rows,
    split_rows,
)

HELD_OUT = [1, 76, 79, 80, 83, 125, 132, 136, 164, 172, 188, 249, 308, 356, 370, 375, 391]


def make_row(row_id: int) -> Row:
    return Row(
        id=row_id,
        prompt_ids=(1, 2, 3),
        answer_ids=(4, 5),
        temperature=0.7,
        seed=2**62 + row_id,
        topic="poem",
        source="written",
        finish="stop",
        messages=({"role": "user", "content": "über\n\u2028 “quotes”"},),
    )


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [make_row(0), make_row(5)]
    append_rows(tmp_path, rows[:1])
    append_rows(tmp_path, rows[1:])
    assert read_rows(tmp_path) == rows


def test_a_torn_last_line_is_not_read_and_can_be_cut(tmp_path: Path) -> None:
    append_rows(tmp_path, [make_row(0), make_row(1)])
    path = tmp_path / ROWS_FILE
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        assert [row.id for row in read_rows(tmp_path)] == [0][: cut // first]
    drop_torn_line(tmp_path)
    assert path.read_bytes() == whole[:first]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    append_rows(tmp_path, [make_row(0), make_row(1)])
    path = tmp_path / ROWS_FILE
    path.write_bytes(path.read_bytes().replace(b'"answer_ids"', b'"answers"', 1))
    with pytest.raises(ConfigError, match=r"line 1: not a row.*answer_ids"):
        read_rows(tmp_path)


def test_no_rows_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no rows\.jsonl"):
        read_rows(tmp_path)


def test_the_split_never_moves() -> None:
    held_out = [row_id for row_id in range(400) if is_held_out(row_id)]
    assert held_out == HELD_OUT  # what was held out once is so in every version
    assert 400 < sum(map(is_held_out, range(10_000))) < 600
    # A larger share takes rows in and gives none back.
    assert set(held_out) <= {row_id for row_id in range(400) if is_held_out(row_id, 0.2)}


def test_rows_are_split_without_loss() -> None:
    rows = [make_row(row_id) for row_id in range(200)]
    learn, held_out = split_rows(rows, share=0.25)
    assert sorted([*learn, *held_out], key=lambda row: row.id) == rows
    assert {row.id for row in held_out} == {each for each in range(200) if is_held_out(each, 0.25)}


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    keep_meta(tmp_path, {"seed": 1, "top_p": 0.9}, {"torch": "1"})
    before = (tmp_path / META_FILE).read_text()
    keep_meta(tmp_path, {"seed": 1, "top_p": 0.9}, {"torch": "2"})
    with pytest.raises(ConfigError, match="data was None, is 'x'; seed was 1, is 2") as caught:
        keep_meta(tmp_path, {"seed": 2, "top_p": 0.9, "data": "x"}, {})
    assert "top_p" not in str(caught.value)
    assert (tmp_path / META_FILE).read_text() == before


def test_rows_of_unknown_origin_are_not_gone_on_with(tmp_path: Path) -> None:
    append_rows(tmp_path, [make_row(0)])
    with pytest.raises(ConfigError, match=r"rows but no meta\.json"):
        keep_meta(tmp_path, {}, {})


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        claim_folder(tmp_path / "new"),
        pytest.raises(ConfigError, match="another run"),
        claim_folder(tmp_path / "new"),
    ):
        pass
    with claim_folder(tmp_path / "new"):
        pass


def test_rows_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_row(0).seed = 3  # type: ignore[misc]
