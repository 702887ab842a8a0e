"""A client process for `server.py`: sends streaming chats, so many at once, and times them.

Plain sockets, so that the client takes little of the processors that it shares with the server.
A line of [bodies, concurrency] in, a line of samples out.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it."""

    ttft_s: float
    e2e_s: float
    num_tokens: int
    error: str | None

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / max(1, self.num_tokens - 1)


async def ask(host: str, port: int, body: dict[str, Any]) -> Sample:
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
        "Connection: close\r\n\r\n"
    )
    begin_s = time.perf_counter()
    first_s = last_s = None
    num_tokens, error = 0, None
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head.encode() + payload)
        status = await reader.readline()
        if b" 200 " not in status:
            rest = (await reader.read(2000)).decode(errors="replace")
            return Sample(0, 0, 0, f"{status.decode().strip()}: {rest[-300:]}")
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            if b'"error"' in line[:20]:
                error = line.decode()[:300]
            elif b'"usage"' in line:
                num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
            else:
                last_s = time.perf_counter()
                # The first chunk only says who speaks.
                if first_s is None and b'"role"' not in line:
                    first_s = last_s
        writer.close()
    except OSError as failure:
        error = f"{type(failure).__name__}: {failure}"
    if error is None and (first_s is None or last_s is None):
        error = "the stream held no text"
    if error is not None or first_s is None or last_s is None:
        return Sample(0, 0, 0, error)
    return Sample(first_s - begin_s, last_s - begin_s, num_tokens, None)


async def ask_all(url: str, bodies: list[dict[str, Any]], concurrency: int) -> list[Sample]:
    parts = urlsplit(url)
    places = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any]) -> Sample:
        async with places:
            return await ask(str(parts.hostname), int(parts.port or 80), body)

    return list(await asyncio.gather(*map(one, bodies)))


def main() -> None:
    for line in sys.stdin:
        bodies, concurrency = json.loads(line)
        samples = asyncio.run(ask_all(sys.argv[1], bodies, concurrency))
        print(json.dumps([asdict(each) for each in samples]), flush=True)


if __name__ == "__main__":
    main()
