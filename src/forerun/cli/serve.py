"""`forerun serve`: the model behind OpenAI's API, until the process is told to end."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .loading import settings_of
from .options import EngineOptions, option, takes_groups
from .screen import err, spinner

if TYPE_CHECKING:
    from ..server.config import ServerConfig

__all__ = ["serve"]

KEYS_VARIABLE = "FORERUN_API_KEY"
# Options of the engine that only a server needs.
ENGINE_FIELDS = ("max_num_seqs", "max_num_batched_tokens", "kv_cache_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where to listen, who may ask, how much at once."""

    host: Annotated[
        str, option("--host", metavar="ADDRESS", help="Default: 127.0.0.1, this machine alone.")
    ] = "127.0.0.1"
    port: Annotated[
        int, option("--port", metavar="N", help="Default: 8000; 0 takes any that is free.")
    ] = 8000
    served_model_name: Annotated[
        list[str] | None,
        option(
            "--served-model-name",
            metavar="NAME",
            help="What clients call the model; may be given several times. Default: --model.",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        option(
            "--api-key-file",
            metavar="FILE",
            help="Keys, one a line: KEY, or NAME KEY, or NAME KEY MAX_REQUESTS. "
            f"{KEYS_VARIABLE} holds keys too, separated by commas.",
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        option(
            "--allowed-host",
            metavar="NAME",
            help="A name for this server in the Host header; may be given several times; * is any.",
        ),
    ] = None
    insecure: Annotated[
        bool, option("--insecure", help="Let other machines in without an API key.")
    ] = False
    public_metrics: Annotated[
        bool, option("--public-metrics", help="Show /metrics without an API key.")
    ] = False
    max_num_seqs: Annotated[
        int | None, option("--max-num-seqs", metavar="N", help="Requests at once. Default: 64.")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        option("--max-num-batched-tokens", metavar="N", help="Tokens a step. Default: 512."),
    ] = None
    kv_cache_tokens: Annotated[
        int | None,
        option("--kv-cache-tokens", metavar="N", help="Default: as the free memory allows."),
    ] = None
    max_queued_requests: Annotated[
        int | None,
        option("--max-num-queued-reqs", metavar="N", help="Requests that may wait. Default: 256."),
    ] = None
    max_queued_tokens: Annotated[
        int | None,
        option(
            "--max-num-queued-tokens",
            metavar="N",
            help="Prompt tokens that may wait. Default: 262144.",
        ),
    ] = None
    max_body_bytes: Annotated[
        int | None,
        option("--max-body-bytes", metavar="N", help="Size of a request. Default: 4 MiB."),
    ] = None
    request_timeout_s: Annotated[
        float | None,
        option("--request-timeout", metavar="SECONDS", help="For an answer. Default: 600."),
    ] = None
    queue_timeout_s: Annotated[
        float | None,
        option("--queue-timeout", metavar="SECONDS", help="For a place to run. Default: 120."),
    ] = None
    drain_timeout_s: Annotated[
        float | None,
        option(
            "--shutdown-timeout",
            metavar="SECONDS",
            help="For answers under way when the server is told to end. Default: 30.",
        ),
    ] = None
    longest_step_s: Annotated[
        float | None,
        option("--longest-step", metavar="SECONDS", help="A longer step hangs. Default: 30."),
    ] = None
    ping_s: Annotated[
        float | None,
        option("--sse-keep-alive", metavar="SECONDS", help="Between pings. Default: 15."),
    ] = None
    stream_interval: Annotated[
        int | None,
        option("--stream-interval", metavar="N", help="Tokens per chunk at least. Default: 1."),
    ] = None
    stream_padding: Annotated[
        int | None,
        option(
            "--stream-padding",
            metavar="BYTES",
            help="Fill chunks up to a multiple of it, so that sizes tell less. Default: 0, not.",
        ),
    ] = None
    metrics_compat: Annotated[
        str | None,
        option(
            "--metrics-compat",
            metavar="NAMES",
            help="vllm: also under the names that its tools look for; or none. Default: vllm.",
        ),
    ] = None


@takes_groups
def serve(engine: EngineOptions, options: ServeOptions) -> None:
    """Serve a model behind OpenAI's API, with speculation, on 127.0.0.1:8000.

    The page at / shows a chat and what speculation is worth. SIGTERM ends it in order.
    """
    config = _config(engine, options)
    speculation = engine.speculation()
    _log()
    with spinner(f"loading {engine.model} (a first start compiles for some 20 s) ..."):
        from ..engine.engine import Engine
        from ..server.run import serve as run

        settings = settings_of(engine) | {
            name: value for name in ENGINE_FIELDS if (value := getattr(options, name)) is not None
        }
        opened = Engine.from_pretrained(engine.model, speculation=speculation, **settings)

    def greet(address: str) -> None:
        err.print(f"serving {config.model_name} at {address} (page: {address}/)", highlight=False)
        if not config.is_loopback and not config.api_keys:
            err.print("anybody who reaches this machine may use it: --insecure", style="yellow")

    with opened:
        run(opened, config, greet)


def _config(engine: EngineOptions, options: ServeOptions) -> ServerConfig:
    from ..server.config import ServerConfig
    from ..server.keys import read_keys

    names = options.served_model_name or [Path(engine.model).name or engine.model]
    given: dict[str, Any] = {
        "model_names": tuple(dict.fromkeys(names)),
        "host": options.host,
        "port": options.port,
        "api_keys": read_keys(options.api_key_file, os.environ.get(KEYS_VARIABLE)),
        "insecure": options.insecure,
        "allowed_hosts": tuple(options.allowed_host or ()),
        "public_metrics": options.public_metrics,
    }
    for name in (
        "max_queued_requests",
        "max_queued_tokens",
        "max_body_bytes",
        "request_timeout_s",
        "queue_timeout_s",
        "drain_timeout_s",
        "longest_step_s",
        "ping_s",
        "stream_interval",
        "stream_padding",
        "metrics_compat",
    ):
        value = getattr(options, name)
        if value is not None:
            given[name] = value
    return ServerConfig(**given)


def _log() -> None:
    """Write what libraries log to stderr, a line each: no text from outside begins another."""

    class OneLine(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            record.msg, record.args = _printable(record.getMessage()), ()
            return super().format(record)

        def formatException(self, ei: Any) -> str:  # noqa: N802  (the library's name)
            lines = super().formatException(ei).splitlines()
            return "\n".join(f"    {_printable(line)}" for line in lines)

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _printable(text: str) -> str:
    """Escape whatever would begin a line or move a terminal's cursor."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "replace").decode()
        for each in text
    )
