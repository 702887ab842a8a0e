"""The door of the server: who may come in, by which name, with how much in the arms.

Pure ASGI, around everything else: what is decided here is decided on the path as it was sent,
before any routing, and denied unless it is allowed. Starlette's BaseHTTPMiddleware would hide
disconnects.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import re
import secrets
from collections.abc import Iterable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ForerunError, Overloaded
from .config import ServerConfig
from .failures import Refusal, describe
from .keys import ApiKey, find_key

__all__ = ["Gate", "refusal_bytes"]

logger = logging.getLogger(__name__)

PUBLIC = frozenset({"/health", "/ready"})
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MAX_HEADERS = 100
SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    ),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Gate:
    """Lets requests through to the application, or answers them itself."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._public = PUBLIC | ({"/metrics"} if config.public_metrics else set())
        names = [*LOOPBACK_HOSTS, *config.allowed_hosts]
        if not config.is_loopback:
            names.append(config.host)
        self._hosts = frozenset(name.lower() for name in names)
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        request_id = _request_id(headers)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["arrival_s"] = asyncio.get_running_loop().time()
        outgoing = _Outgoing(send, request_id)
        self._num_open += 1
        try:
            state["key"] = self._admit(scope, headers)
            body = _Body(receive, self._config, headers)
            await self._app(scope, body, outgoing)
        except Refusal as refusal:
            await outgoing.refuse(refusal)
        except asyncio.CancelledError:
            raise
        except ClientDisconnect:
            return
        except Exception as error:
            told = describe(error, request_id)
            if not isinstance(error, ForerunError) or told.status == 500:
                logger.exception("request %s failed", request_id)
            await outgoing.refuse(told)
        finally:
            self._num_open -= 1

    def _admit(self, scope: Scope, headers: list[tuple[bytes, bytes]]) -> ApiKey | None:
        """Decide whether a request may come in at all, and as whom."""
        if len(headers) > MAX_HEADERS:
            raise Refusal(431, f"{len(headers)} headers; {MAX_HEADERS} are the most")
        hosts = [value for name, value in headers if name == b"host"]
        self._check_host(hosts, (scope.get("server") or ("",))[0])
        path = scope["path"]
        if path not in PUBLIC and self._num_open > self._config.max_open_requests:
            raise describe(
                Overloaded(f"more than {self._config.max_open_requests} requests are open", 1.0), ""
            )
        if not self._config.api_keys or path in self._public:
            return None
        given = [value for name, value in headers if name == b"authorization"]
        key = None if len(given) != 1 else find_key(self._config.api_keys, _secret(given[0]))
        if key is None:
            what = "no API key was sent" if not given else "the API key is wrong"
            scheme = "Bearer" if path.startswith("/v1") else 'Basic realm="forerun"'
            raise Refusal(
                401,
                f"{what}; send it as 'Authorization: Bearer KEY'",
                "authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": scheme},
            )
        return key

    def _check_host(self, given: list[bytes], address: str) -> None:
        """Refuse names that are not ours: a page elsewhere may have made its name point here.

        The `address` that the client has reached us at is a name that cannot be made to.
        """
        if "*" in self._hosts or (self._config.api_keys and not self._config.is_loopback):
            return  # such a page has no key
        name = given[0].decode("latin-1").lower() if len(given) == 1 else ""
        host = re.sub(r":\d{1,5}$", "", name)
        if host not in self._hosts and host not in (address, f"[{address}]"):
            raise Refusal(
                421,
                "the Host header names another server; --allowed-host NAME admits a name",
                code="wrong_host",
            )


class _Body:
    """A request's body, in time and not too much of it; then the news that the client has left."""

    def __init__(
        self, receive: Receive, config: ServerConfig, headers: Iterable[tuple[bytes, bytes]]
    ) -> None:
        self._receive = receive
        self._limit = config.max_body_bytes
        self._timeout_s = config.body_timeout_s
        self._num_bytes = 0
        self._is_whole = False
        self._end_s: float | None = None  # by when the body must be there, from its first byte on
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._limit:
                raise self._too_big()

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()
        if self._end_s is None:
            self._end_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._end_s):
                message = await self._receive()
        except TimeoutError:
            raise Refusal(
                408, f"the body did not come within {self._timeout_s:g} s", code="slow_request"
            ) from None
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes > self._limit:
                raise self._too_big()
            self._is_whole = not message.get("more_body", False)
        return message

    def _too_big(self) -> Refusal:
        return Refusal(413, f"the body exceeds {self._limit} bytes", code="request_too_large")


class _Outgoing:
    """What is sent, with the headers that every answer has."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self._has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            own = [*SAFE_HEADERS, (b"x-request-id", self._request_id.encode())]
            message = {**message, "headers": [*message.get("headers", []), *own]}
        await self._send(message)

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error, unless an answer is on its way already."""
        if self._has_begun:
            return
        body = refusal_bytes(refusal)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *((name.encode(), value.encode()) for name, value in refusal.headers.items()),
        ]
        if refusal.status in (408, 413):
            headers.append((b"connection", b"close"))  # what is still being sent is not read
        await self({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def refusal_bytes(refusal: Refusal) -> bytes:
    """Write an error as JSON."""
    return json.dumps(refusal.body()).encode()


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Take the client's id if it is harmless in logs, or make one."""
    for name, value in headers:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if REQUEST_ID.fullmatch(text):
                return text
    return secrets.token_hex(12)


def _secret(authorization: bytes) -> str:
    """Read the key out of `Bearer KEY`, or `Basic` with it as the password (for browsers)."""
    scheme, _, rest = authorization.decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""
