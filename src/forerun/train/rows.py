"""Rows on disk: prompts with the target's own answers, one JSON line each, and who is held out."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import ConfigError

__all__ = [
    "META_FILE",
    "ROWS_FILE",
    "Row",
    "append_rows",
    "claim_folder",
    "drop_torn_line",
    "is_held_out",
    "keep_meta",
    "read_rows",
    "split_rows",
]

ROWS_FILE = "rows.jsonl"
META_FILE = "meta.json"
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and what the target answered."""

    id: int  # the number of the prompt among all that were tried; rises along the file
    prompt_ids: tuple[int, ...]  # with everything that the chat template adds
    answer_ids: tuple[int, ...]  # with the token that ended it, if one did
    temperature: float
    seed: int
    topic: str
    source: str  # written, about_text, follow_up, given
    finish: str  # stop, length, loop: the answer repeated itself and was cut
    messages: tuple[Mapping[str, Any], ...]  # what the template rendered; () for plain text

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Row:
        """Read a line; ValueError, KeyError or TypeError if it is none."""
        data = json.loads(line)
        for name in ("prompt_ids", "answer_ids", "messages"):
            data[name] = tuple(data[name])
        return cls(**{each.name: data[each.name] for each in fields(cls)})


def read_rows(folder: Path) -> list[Row]:
    """Read all rows of a folder, also while another process adds to it.

    A last line that is not whole is left out: whoever writes it has not finished.

    Raises:
        ConfigError: no rows there, or a line in the middle that is none, with its number.
    """
    path = folder / ROWS_FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} holds no {ROWS_FILE}; write training data there first"
        ) from None
    whole = text[: text.rfind(b"\n") + 1]
    return [_read_line(path, number, line) for number, line in enumerate(whole.splitlines(), 1)]


def _read_line(path: Path, number: int, line: bytes) -> Row:
    try:
        return Row.from_json(line.decode())
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}, line {number}: not a row ({type(error).__name__}: {error}); the file is "
            "damaged: cut it before this line and go on from there, or start in another folder"
        ) from None


def drop_torn_line(folder: Path) -> None:
    """Cut what a killed run left of its last line."""
    path = folder / ROWS_FILE
    if not path.exists():
        return
    with path.open("r+b") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)


def append_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Add rows, and return once they are on the disk."""
    with (folder / ROWS_FILE).open("a", encoding="utf-8") as file:
        file.writelines(row.to_json() + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def is_held_out(row_id: int, share: float = HELD_OUT_SHARE) -> bool:
    """Say whether a row is for judging, not for learning: by a hash, so it never changes sides."""
    digest = hashlib.blake2b(str(row_id).encode(), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "big") < share * 2**64


def split_rows(rows: Iterable[Row], share: float = HELD_OUT_SHARE) -> tuple[list[Row], list[Row]]:
    """Split rows into those to learn from and those held out."""
    learn: list[Row] = []
    held_out: list[Row] = []
    for row in rows:
        (held_out if is_held_out(row.id, share) else learn).append(row)
    return learn, held_out


@contextmanager
def claim_folder(folder: Path) -> Iterator[None]:
    """Make the folder and keep other runs out of it; the claim dies with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run is writing to {folder}; wait for it, or name another folder"
            ) from None
        yield


def keep_meta(folder: Path, settings: Mapping[str, Any], made_with: Mapping[str, Any]) -> None:
    """Write down what the rows are made with; refuse to go on with other settings.

    `made_with` is for people to read and may differ when a run goes on.

    Raises:
        ConfigError: the folder was begun with other settings, named one by one.
    """
    path = folder / META_FILE
    settings = json.loads(json.dumps(settings))  # as they will be read back
    if not path.exists():
        if (folder / ROWS_FILE).exists():
            raise ConfigError(f"{folder} holds rows but no {META_FILE}; name another folder")
        beside = path.with_suffix(".new")
        beside.write_text(
            json.dumps({"settings": settings, "made_with": made_with}, indent=2) + "\n"
        )
        beside.replace(path)
        return
    try:
        known = json.loads(path.read_text())["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); name another folder") from None
    names = sorted({*known, *settings})
    changed = [
        f"{name} was {known.get(name)!r}, is {settings.get(name)!r}"
        for name in names
        if known.get(name) != settings.get(name)
    ]
    if changed:
        raise ConfigError(
            f"{folder} was begun with other settings ({'; '.join(changed)}); "
            "repeat those, or name another folder"
        )
