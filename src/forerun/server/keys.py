"""API keys: where they come from, and whose a presented one is. Kept as digests only.

A file or the environment holds them, never a command line, which every user of a machine can read.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError

__all__ = ["ApiKey", "find_key", "parse_keys", "read_keys"]

MIN_KEY_CHARS = 8


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key as the server remembers it."""

    name: str  # how it is called in logs; also keeps what its owner computed apart from others'
    digest: bytes = field(repr=False)
    max_requests: int | None = None  # at once; None: as many as the server takes

    @staticmethod
    def of(secret: str, name: str, max_requests: int | None = None) -> ApiKey:
        if len(secret) < MIN_KEY_CHARS or not secret.isascii() or not secret.isprintable():
            raise ConfigError(
                f"the API key {name!r} must have at least {MIN_KEY_CHARS} printable ASCII "
                "characters and no spaces"
            )
        return ApiKey(name, _digest(secret), max_requests)


def find_key(keys: Sequence[ApiKey], presented: str) -> ApiKey | None:
    """Find whose key was presented; takes as long whichever it is, or none."""
    digest = _digest(presented)
    found = None
    for key in keys:
        if secrets.compare_digest(key.digest, digest):
            found = key
    return found


def parse_keys(text: str, where: str, stem: str = "key") -> tuple[ApiKey, ...]:
    """Read keys, one a line: `KEY`, or `NAME KEY`, or `NAME KEY MAX_REQUESTS`; # begins a comment.

    Raises:
        ConfigError: a line that is none of these, or a name or key that stands twice.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = re.sub(r"(^|\s)#.*", "", line).split()
        if not words:
            continue
        place = f"line {number} of {where}"
        if len(words) > 3:
            raise ConfigError(f"{place} has {len(words)} words; KEY, or NAME KEY [MAX_REQUESTS]")
        name, secret = (f"{stem}{number}", words[0]) if len(words) == 1 else (words[0], words[1])
        limit = None
        if len(words) == 3:
            if not (words[2].isascii() and words[2].isdigit()) or int(words[2]) < 1:
                raise ConfigError(f"{place}: {words[2]!r} is no number of requests from 1 on")
            limit = int(words[2])
        key = ApiKey.of(secret, name, limit)
        if any(each.name == name or each.digest == key.digest for each in keys):
            raise ConfigError(f"{place}: the name {name!r} or its key stands there already")
        keys.append(key)
    if not keys:
        raise ConfigError(f"{where} holds no API key")
    return tuple(keys)


def read_keys(path: Path | None, environment: str | None) -> tuple[ApiKey, ...]:
    """Read keys from a file and from FORERUN_API_KEY (separated by commas)."""
    keys: tuple[ApiKey, ...] = ()
    if path is not None:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
        keys += parse_keys(text, str(path))
    if environment:
        keys += parse_keys(environment.replace(",", "\n"), "FORERUN_API_KEY", "environment")
    for what in ("name", "digest"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise ConfigError("one API key, or its name, stands in the file and in FORERUN_API_KEY")
    return keys


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
