"""The server as one ASGI application: the door, the endpoints behind it, and what is not there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from . import info_routes
from .failures import Refusal
from .gate import Gate
from .openapi import openapi
from .responses import responses
from .routes import chat_completions, completions
from .service import Service

__all__ = ["build_app"]

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}


def build_app(service: Service) -> ASGIApp:
    """Put the application together around a service."""
    return Gate(_Application(service), service.config)


class _Application:
    """Routes a request that came through the door."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._router = Router(
            [*_api_routes(), *_page_routes()], redirect_slashes=False, default=_not_found
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["service"] = self._service
        scope["app"] = self  # Starlette raises its HTTPException only where there is one
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            raise _translate(error, scope) from None


def _api_routes() -> list[BaseRoute]:
    def post(path: str, endpoint: Callable[[HttpRequest], Awaitable[Any]]) -> Route:
        return Route(path, endpoint, methods=["POST"])

    async def document(http: HttpRequest) -> Response:
        return JSONResponse(openapi())

    return [
        post("/v1/chat/completions", chat_completions),
        post("/v1/completions", completions),
        post("/v1/responses", responses),
        Route("/v1/models", info_routes.models),
        Route("/v1/models/{name:path}", info_routes.model),
        post("/tokenize", info_routes.tokenize),
        post("/v1/tokenize", info_routes.tokenize),
        post("/detokenize", info_routes.detokenize),
        post("/v1/detokenize", info_routes.detokenize),
        Route("/tokenizer_info", info_routes.tokenizer_info),
        Route("/health", info_routes.health),
        Route("/ready", info_routes.ready),
        Route("/version", info_routes.version),
        Route("/metrics", info_routes.metrics),
        Route("/openapi.json", document),
        Route("/dashboard/state", info_routes.dashboard_state),
    ]


def _page_routes() -> list[BaseRoute]:
    """Serve the files of the page, read once: no path from outside is ever opened."""
    routes: list[BaseRoute] = []
    for entry in resources.files(__package__).joinpath("dashboard").iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix not in CONTENT_TYPES:
            continue
        endpoint = _file(entry.read_bytes(), CONTENT_TYPES[suffix])
        routes.append(Route(f"/dashboard/{entry.name}", endpoint))
        if entry.name == "index.html":
            routes.append(Route("/", endpoint))
    return routes


def _file(body: bytes, content_type: str) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def endpoint(http: HttpRequest) -> Response:
        headers = {"content-type": content_type, "cache-control": "no-cache"}
        return Response(body, headers=headers)

    return endpoint


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise _missing(scope)


def _missing(scope: Scope) -> Refusal:
    return Refusal(
        404,
        f"there is nothing at {scope['method']} {scope['path'][:128]!r}; see /openapi.json",
        code="not_found",
    )


def _translate(error: HTTPException, scope: Scope) -> Refusal:
    if error.status_code == 404:
        return _missing(scope)
    if error.status_code == 405:
        return Refusal(
            405,
            f"{scope['path'][:128]!r} does not take {scope['method'][:16]}",
            code="method_not_allowed",
            headers=dict(error.headers or {}),
        )
    return Refusal(error.status_code, str(error.detail)[:200])
