"""The page on the real server: a chat streams, guesses are marked, the charts fill."""

from __future__ import annotations

import os
from pathlib import Path

from dashboard_browser import Browser
from reference.live_server import serving
from reference.tiny import Tiny

TEXT = "one two three one two three one two three"


def test_a_chat_on_the_real_server(browser: Browser, repeating: Tiny) -> None:
    with serving(repeating.folder, server={"model_names": ("tiny<b>",)}) as live:
        page = browser.page()
        try:
            page.goto(live.url)
            page.wait("document.getElementById('model').textContent === 'tiny<b>'")
            # The tiny model's context is small.
            page.run("document.getElementById('max-tokens').value = 24")
            page.run("document.querySelector('#prompt').focus()")
            for number in (1, 2):
                page.type(TEXT)
                page.key("Enter")
                done = f"document.querySelectorAll('.answer[aria-busy=false]').length === {number}"
                page.wait(done)
            page.wait("document.querySelectorAll('.answer mark').length > 0")
            page.wait("+document.querySelector('#totals').textContent.length > 0")
            page.wait("[...document.querySelectorAll('.strip path')].length > 0")
            assert page.complaints == []
            where = os.environ.get("FORERUN_SCREENSHOTS")
            if where:
                page.shot(Path(where) / "live.png")
        finally:
            page.close()
        live.check_idle()


def test_with_keys_the_page_needs_one(browser: Browser, tiny: Tiny) -> None:
    import httpx

    from forerun.server.keys import ApiKey

    key = ApiKey.of("a-long-secret", "someone")
    with serving(tiny.folder, server={"api_keys": (key,)}) as live:
        for path in ("/", "/dashboard/main.js", "/dashboard/state", "/metrics"):
            refused = httpx.get(live.url + path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"].startswith("Basic")
            assert httpx.get(live.url + path, auth=("", "a-long-secret")).status_code == 200
