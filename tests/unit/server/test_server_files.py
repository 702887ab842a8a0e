"""How many files the server may open: as many as its connections, as far as the system lets it."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys

import pytest

from forerun.server.run import _allow_open_files

INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised", "warned"),
    [
        ((1024, 20_000), (4352, 20_000), False),
        ((1024, INFINITY), (4352, INFINITY), False),
        ((1024, 2000), (2000, 2000), True),
        ((8000, 20_000), None, False),
        ((INFINITY, INFINITY), None, False),
    ],
)
def test_the_own_limit_is_raised_and_never_lowered(limits, raised, warned, monkeypatch, caplog):
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, given: set_to.append(given))
    with caplog.at_level(logging.WARNING):
        _allow_open_files(4352)
    assert set_to == ([] if raised is None else [raised])
    assert ("may open 2000 files" in caplog.text) == warned


def test_the_system_takes_it():
    script = """
import resource
from forerun.server.run import _allow_open_files
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
_allow_open_files(400)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "400"
