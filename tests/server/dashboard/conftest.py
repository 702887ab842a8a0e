"""A browser for the whole run, a page and a fake server for each test."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from dashboard_browser import Browser, Open, Page, find_chromium
from dashboard_fake import Fake, Script


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on PATH: `apt-get install chromium` runs the dashboard's tests")
    browser = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def script() -> Script:
    """What the fake server says; tests change it before, or while, a page is open."""
    return Script()


@pytest.fixture
def fake(script: Script) -> Iterator[Fake]:
    with Fake(script) as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


@pytest.fixture
def open_page(browser: Browser, fake: Fake) -> Iterator[Open]:
    """open_page(width=..., prefers_color_scheme=...): the dashboard, with its first state shown."""
    pages: list[Page] = []

    def open_(width: int = 1440, height: int = 900, known: bool = True, **media: str) -> Page:
        page = browser.page(width, height, **media)
        pages.append(page)
        page.goto(fake.url)
        if known:
            page.wait("document.getElementById('model').textContent !== '…'")
        return page

    yield open_
    for page in pages:
        page.close()
