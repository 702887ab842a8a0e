"""One live server for most tests of the API; those that break things make their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reference.live_server import Live, serving
from reference.tiny import Tiny


@pytest.fixture(scope="session")
def live(tiny: Tiny) -> Iterator[Live]:
    """A tiny model behind a server with default limits."""
    with serving(tiny.folder) as running:
        yield running
        running.check_idle()
