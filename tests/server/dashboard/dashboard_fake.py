"""A stand-in for `forerun serve` that tells the page whatever a test, or a person, wants it to see.

Standard library only; knows the two addresses of the page's API and nothing about models.
By hand: `python tests/server/dashboard/dashboard_fake.py --port 8123`.
"""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

PAGE_DIR = Path(__file__).resolve().parents[3] / "src/forerun/server/dashboard"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
MAX_DRAFT = 15

# [accepted pieces], [the model's own]: one step each
Step = tuple[list[str], list[str]]
STORY: list[Step] = [
    ([], ["The"]),
    ([" quick", " brown"], [" cat"]),
    ([" jumps", " over", " the", " lazy", " dog"], ["."]),
    ([" The", " dog", " barks", " at", " the"], [" cat"]),
    ([], ["."]),
    ([" The", " cat", " runs"], [" into"]),
    ([" the", " forest", ","], [" and"]),
    ([" the", " dog", " runs", " after", " the"], [" cat"]),
    ([], ["."]),
]

SERIES = [
    "steps", "drafted", "accepted", "emitted", "acceptance_rate", "mean_acceptance_length",
    "tpot_p50_ms", "tpot_p95_ms", "tpot_p99_ms", "ttft_p50_ms", "ttft_p95_ms", "e2e_p50_ms",
    "queue_p50_ms", "draft_ms", "verify_ms", "host_ms", "speedup", "batch_size", "draft_length",
    "running", "waiting", "cache_usage", "wasted_tokens_per_s",
]  # fmt: skip


def sample(age_s: int) -> dict[str, float | None]:
    """The bin of age_s seconds before the start: nothing, a good time, a pause, a costly time."""
    if 95 <= age_s < 125 or age_s >= 280:
        idle = {"steps": 0, "running": 0, "waiting": 0, "cache_usage": 0.02}
        return dict.fromkeys(SERIES) | idle
    wave = math.sin(age_s / 7) + 0.6 * math.sin(age_s / 2.3)
    costly = 30 <= age_s < 70
    batch = 9 if costly else 2
    draft_length = 7.0 if costly else 5 + wave
    rate = (0.78 if costly else 0.58) + 0.06 * wave
    steps = 40
    drafted = steps * draft_length
    accepted = drafted * rate
    length = 1 + accepted / steps
    draft_ms, verify_ms, host_ms = 0.4 + 0.1 * wave, (46 if costly else 24) + wave, 1.1
    tpot_ms = (draft_ms + verify_ms + host_ms) / length
    return {
        "steps": steps, "drafted": round(drafted), "accepted": round(accepted),
        "emitted": round(accepted + steps),
        "acceptance_rate": rate, "mean_acceptance_length": length,
        "tpot_p50_ms": tpot_ms, "tpot_p95_ms": tpot_ms * 1.5 + wave,
        "tpot_p99_ms": tpot_ms * 1.9 + 2 * wave,
        "ttft_p50_ms": 60 + 8 * wave, "ttft_p95_ms": 140 + 20 * wave,
        "e2e_p50_ms": 1900 + 200 * wave, "queue_p50_ms": 250 if costly else 4,
        "draft_ms": draft_ms, "verify_ms": verify_ms, "host_ms": host_ms,
        "speedup": 0.78 + 0.05 * wave if costly else 1.9 + 0.2 * wave,
        "batch_size": batch, "draft_length": draft_length,
        "running": batch, "waiting": 5 if costly else 0,
        "cache_usage": 0.72 if costly else 0.31, "wasted_tokens_per_s": drafted - accepted,
    }  # fmt: skip


@dataclass
class Script:
    """What the server says, and what it was asked."""

    model: str = "smollm2-135m"
    drafters: list[str] = field(default_factory=lambda: ["ngram", "none"])
    status: str = "ready"
    api_key: str | None = None
    empty: bool = False  # nothing has run yet
    enabled: bool = True
    health: list[dict[str, str]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=lambda: list(STORY))
    step_s: float = 0.0
    endless: bool = False
    error: str | None = None  # an HTTP error instead of an answer
    broken_off: str | None = None  # an error chunk after the steps
    state_status: int = 200
    state: dict[str, Any] = field(default_factory=dict)  # replaces parts of the state
    # seen:
    asked: list[dict[str, Any]] = field(default_factory=list)
    since: list[str | None] = field(default_factory=list)
    aborted: threading.Event = field(default_factory=threading.Event)
    started_s: float = field(default_factory=time.time)

    def reply(self, since: str | None) -> dict[str, Any]:
        now_s = time.time()
        last = int(now_s)
        start = int(self.started_s)
        first = start - 320 if since is None else max(start - 320, int(float(since)))
        times = list(range(first, last + 1))
        rows = [sample(start - t) for t in times]
        if self.empty:
            times, rows = [], []
        series = {name: [row[name] for row in rows] for name in SERIES}
        offered = [900, 860, 790, 700, 610, 480, 300, 120, 40, 12, 0, 0, 0, 0, 0]
        accepted = [round(n * 0.86 * 0.9**i) for i, n in enumerate(offered)]
        histogram = [210, 95, 110, 120, 130, 90, 60, 40, 22, 9, 5, 0, 0, 0, 0, 0]
        totals = {
            "steps": 12345, "drafts": 9012, "drafted": 45210, "accepted": 27810, "emitted": 40155,
            "requests": 214, "prompt_tokens": 88120, "cached_tokens": 31240, "saved_s": 214.6,
            "preemptions": 1, "fallbacks": 2, "rejected": 3,
        }  # fmt: skip
        events = [
            {"time_s": start - 240, "kind": "config", "text": "max_draft 7 to 15"},
            {
                "time_s": start - 70,
                "kind": "drift",
                "text": "steps cost 1.9 times as much as calibrated",
            },
            {"time_s": start - 28, "kind": "load", "text": "batch back to 2: drafts resume"},
        ]
        speculation = {
            "enabled": self.enabled, "reason": None if self.enabled else "drafter failed to load"
        }  # fmt: skip
        idle_reasons = {"no_match": 1801, "sampling_too_warm": 402, "near_the_end": 61}
        by_position = {"offered": offered, "accepted": accepted}
        return {
            "model": self.model, "version": "0.1.0",
            "drafter": self.drafters[0], "drafters": self.drafters,
            "max_draft": MAX_DRAFT, "status": self.status,
            "uptime_s": now_s - self.started_s + 8000,
            "machine": "AMD EPYC, 2 threads, float32", "max_model_len": 8192,
            "speculation": speculation, "now_s": now_s,
            "totals": dict.fromkeys(totals, 0) if self.empty else totals,
            "series": {"time_s": times, **series},
            "by_position": {"offered": [], "accepted": []} if self.empty else by_position,
            "accepted_histogram": [] if self.empty else histogram,
            "idle_reasons": {} if self.empty else idle_reasons,
            "events": [] if self.empty else events, "health": self.health,
        } | self.state  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/":
            self._file("index.html")
        elif url.path == "/dashboard/state":
            since = parse_qs(url.query).get("since", [None])[0]
            self.server.script.since.append(since)
            if self.server.script.state_status != 200:
                self._json(self.server.script.state_status, {"error": {"message": "not now"}})
            elif self._allowed():
                self._json(200, self.server.script.reply(since))
        elif url.path.startswith("/dashboard/"):
            self._file(url.path.removeprefix("/dashboard/"))
        else:
            self._json(404, {"error": {"message": "no such address"}})

    def do_POST(self) -> None:
        script = self.server.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script.asked.append(body)
        if not self._allowed():
            return
        if script.error is not None:
            self._json(400, {"error": {"message": script.error}})
            return
        self._head(200, "text/event-stream; charset=utf-8", None)
        try:
            self._stream(body, script)
        except (BrokenPipeError, ConnectionResetError):
            script.aborted.set()

    def _stream(self, body: dict[str, Any], script: Script) -> None:
        speculative = body["speculative"]["enabled"]
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        self.wfile.write(b": keep-alive\n\n")
        num_accepted = num_tokens = num_steps = 0
        while True:
            for guessed, own in script.steps:
                pieces = guessed + own
                num_accepted += len(guessed)
                num_tokens += len(pieces)
                num_steps += 1
                choice: dict[str, Any] = {"index": 0, "delta": {"content": "".join(pieces)}}
                if body["speculative"]["mark"]:
                    count = len(guessed) if speculative else 0
                    drafter = body["speculative"]["drafter"]
                    choice["speculative"] = {
                        "num_accepted": count,
                        "drafter": drafter,
                        "pieces": pieces,
                    }
                self._event({"choices": [choice]})
                time.sleep(script.step_s)
            if not script.endless:
                break
        if script.broken_off is not None:
            self._event({"error": {"message": script.broken_off}})
            self.wfile.write(b"data: [DONE]\n\n")
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        num_drafted = 2 * num_accepted if speculative else 0
        self._event({
            "choices": [],
            "usage": {
                "prompt_tokens": 9, "completion_tokens": num_tokens, "total_tokens": 9 + num_tokens,
            },
            "metrics": {
                "time_to_first_token_ms": 41.5, "generation_time_ms": 300.0, "queue_time_ms": 0.2,
                "tokens_per_second": 91.4 if speculative else 38.9,
                "speculative_decoding": {
                    "mean_acceptance_length": num_tokens / num_steps, "draft_acceptance_rate": 0.5,
                    "num_spec_steps": num_steps,
                    "num_accepted_draft_tokens": num_accepted if speculative else 0,
                    "num_draft_tokens": num_drafted, "acceptance_histogram": [3, 0, 1],
                },
            },
        })  # fmt: skip
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def _allowed(self) -> bool:
        key = self.server.script.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._json(401, {"error": {"message": "wrong or missing API key"}})
        return False

    def _file(self, name: str) -> None:
        path = PAGE_DIR / name
        if path.parent != PAGE_DIR or not path.is_file():
            self._json(404, {"error": {"message": "no such file"}})
            return
        content = path.read_bytes()
        self._head(200, TYPES[path.suffix] + "; charset=utf-8", len(content))
        self.wfile.write(content)

    def _json(self, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self._head(status, "application/json", len(content))
        self.wfile.write(content)

    def _head(self, status: int, kind: str, length: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", "default-src 'self'")
        self.send_header("X-Content-Type-Options", "nosniff")
        if length is None:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()


class Fake(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Script, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.script = script
        self.url = f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a browser that leaves is no news


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8123)
    options = parser.parse_args()
    with Fake(Script(step_s=0.15), options.port) as fake:
        fake.serve_forever()
