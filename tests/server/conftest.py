"""One live server for most tests of the API; those that break things make their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reference.tiny import Tiny
from server.live import Live, serving


@pytest.fixture(scope="session")
def live(tiny: Tiny) -> Iterator[Live]:
    """A tiny model behind a server with default limits."""
    with serving(tiny.folder) as running:
        yield running
        running.check_idle()
