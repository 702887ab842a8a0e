"""How the server is set up: where it listens, who may ask, and how much of anything is too much."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields
from typing import Any, Self

from ..errors import ConfigError, refuse_unknown
from .keys import ApiKey

__all__ = ["ServerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Limits and doors of one server. Frozen; checked once.

    Raises:
        ConfigError: a value outside its range, or an address that others reach without a key.
        UnknownOption: a name that no setting has.
    """

    model_names: tuple[str, ...]  # what clients may call the model; the first is what it is called
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[ApiKey, ...] = ()
    insecure: bool = False  # let others in without a key
    allowed_hosts: tuple[str, ...] = ()  # names in Host beside the loopback's; "*": any
    public_metrics: bool = False  # /metrics without a key
    max_body_bytes: int = 4 << 20
    max_queued_requests: int = 256
    max_queued_tokens: int = 262_144  # of prompts that wait
    max_open_requests: int = 1024
    max_connections: int = 4096  # idle ones too
    max_prompts: int = 64  # in one request
    max_samples: int = 8  # answers to one prompt
    header_timeout_s: float = 10.0  # to send the head of a request
    body_timeout_s: float = 30.0  # to send its body
    queue_timeout_s: float = 120.0  # to wait for a place
    request_timeout_s: float = 600.0  # for a whole answer; requests may ask for less
    template_timeout_s: float = 5.0
    drain_timeout_s: float = 30.0  # for answers under way when the server is told to end
    longest_step_s: float = 30.0  # a step that takes longer hangs
    ping_s: float = 15.0  # between signs of life in a silent stream
    stream_interval: int = 1  # tokens gathered before a chunk is sent
    stream_padding: int = 0  # bytes to whose multiple a chunk is filled up; 0: not at all
    metrics_compat: str = "vllm"  # vllm, none: also under the names that vLLM's tools look for

    def __new__(cls, **given: Any) -> Self:
        refuse_unknown(given, (each.name for each in fields(cls)), cls.__name__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("a served model has a name")
        for name, low, high in (
            ("port", 0, 65535),
            ("max_body_bytes", 1024, 1 << 30),
            ("max_queued_requests", 0, 1 << 20),
            ("max_queued_tokens", 1, 1 << 40),
            ("max_open_requests", 1, 1 << 20),
            ("max_connections", 1, 1 << 20),
            ("max_prompts", 1, 4096),
            ("max_samples", 1, 128),
            ("stream_interval", 1, 1 << 20),
            ("stream_padding", 0, 1 << 16),
        ):
            _check_range(name, getattr(self, name), low, high)
        for each in fields(self):
            if each.name.endswith("_s") and not 0 < getattr(self, each.name) <= 86_400:
                raise ConfigError(f"{each.name}={getattr(self, each.name)} is outside (0, 86400]")
        if self.metrics_compat not in ("vllm", "none"):
            raise ConfigError(f"metrics_compat={self.metrics_compat!r} is neither vllm nor none")
        if not self.is_loopback and not self.api_keys and not self.insecure:
            raise ConfigError(
                f"host {self.host} can be reached by others, and there is no API key; give "
                "--api-key-file or FORERUN_API_KEY, listen on 127.0.0.1, or insist with --insecure"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def model_name(self) -> str:
        return self.model_names[0]


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r} is not an integer from {low} to {high}")
