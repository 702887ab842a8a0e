"""Decoded JSON objects whose values are checked as they are read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelFileError

__all__ = ["Fields", "read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or say which file is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelFileError(f"{path}: no readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: found a {type(value).__name__}, expected an object")
    return value


class Fields:
    """One object; null counts as absent. Every refusal names the key, what was found and wanted."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def _get(self, key: str, default: Any, wanted: str) -> Any:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelFileError(f"{self._where}: {key!r} is missing; expected {wanted}")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> ModelFileError:
        return ModelFileError(f"{self._where}: {key}={value!r}; expected {wanted}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        if not (math.isfinite(value) and value > 0):
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default, "true or false")
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self._get(key, None, "a string")
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def has(self, key: str) -> bool:
        return key in self._values

    def raw(self, key: str) -> Any:
        return self._values.get(key)
