"""Headless Chromium driven over its DevTools pipe: no driver program, no websocket, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 30.0
KEYS = {
    "Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), " ": (32, " "),
    "ArrowLeft": (37, ""), "ArrowRight": (39, ""), "Home": (36, ""), "End": (35, ""),
}  # fmt: skip


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    def __init__(self, program: str, profile: Path) -> None:
        read_commands, write_commands = os.pipe()
        read_replies, write_replies = os.pipe()
        # Chromium wants the pipe at 3 and 4; high copies first, lest one end overwrite the other.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 50) for fd in (read_commands, write_replies)]
        os.close(read_commands)
        os.close(write_replies)

        def place() -> None:
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._process = subprocess.Popen(
            [
                program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--disable-extensions", "--disable-background-networking",
                "--disable-component-update", "--renderer-process-limit=1",
                "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
            ],
            preexec_fn=place, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in theirs:
            os.close(fd)
        self._commands = os.fdopen(write_commands, "wb")
        self._replies = os.fdopen(read_replies, "rb")
        self._next_id = 0
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self.pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        buffer = b""
        while block := os.read(self._replies.fileno(), 1 << 16):
            buffer += block
            *messages, buffer = buffer.split(b"\0")
            for raw in messages:
                message = json.loads(raw)
                if "id" in message:
                    self._answers[message["id"]].put(message)
                elif page := self.pages.get(message.get("sessionId", "")):
                    page.hear(message["method"], message["params"])

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        answer = self._answers[self._next_id] = queue.Queue()
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        reply = answer.get(timeout=TIMEOUT_S)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        return reply["result"]

    def page(self, width: int = 1440, height: int = 900, **media: str) -> Page:
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)[
            "targetId"
        ]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.size(width, height)
        page.media(**media)
        return page

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        self._commands.close()
        self._replies.close()


class Page:
    """One tab in a context of its own, so with storage of its own."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context
        self.complaints: list[str] = []  # console errors, uncaught exceptions, CSP violations
        self.addresses: list[str] = []  # everything it asked for

    def hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.addresses.append(params["request"]["url"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def size(self, width: int, height: int, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip

    def media(self, **features: str) -> None:
        """media(prefers_color_scheme="dark")"""
        pairs = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.call("Emulation.setEmulatedMedia", features=pairs)

    def goto(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        reply = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in reply:
            raise RuntimeError(
                reply["exceptionDetails"].get("exception", {}).get("description", "?")
            )
        return reply["result"].get("value")

    def wait(self, condition: str, timeout_s: float = TIMEOUT_S) -> Any:
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            if value := self.run(condition):
                return value
            time.sleep(0.05)
        raise AssertionError(f"never came true: {condition}; page says {self.complaints}")

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def key(self, key: str, shift: bool = False) -> None:
        code, text = KEYS.get(key, (0, key))
        common = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        self.call(
            "Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def shot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)
        del self._browser.pages[self._session]


# Opens the dashboard; takes the size of the window and media features.
Open = Callable[..., Page]
