"""The server's OpenAPI document, made from the very models that check requests."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .._version import __version__
from .chat import ChatFields
from .completions import CompletionFields
from .info_routes import DetokenizeFields, TokenizeFields
from .responses import ResponseFields

__all__ = ["openapi"]

BODIES: Mapping[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatFields, "Answer a conversation."),
    "/v1/completions": (CompletionFields, "Continue prompts."),
    "/v1/responses": (ResponseFields, "Answer an input; nothing is stored."),
    "/tokenize": (TokenizeFields, "Turn text or messages into token ids."),
    "/detokenize": (DetokenizeFields, "Turn token ids into text."),
}
READS: Mapping[str, tuple[str, str]] = {
    "/v1/models": ("List the models.", "application/json"),
    "/v1/models/{name}": ("Show a model.", "application/json"),
    "/tokenizer_info": ("Show the tokenizer.", "application/json"),
    "/health": ("Say whether the process lives.", "application/json"),
    "/ready": ("Say whether requests are taken.", "application/json"),
    "/version": ("Say which version this is.", "application/json"),
    "/metrics": ("Show metrics for Prometheus.", "text/plain"),
    "/dashboard/state": ("Show what the page shows.", "application/json"),
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
REFUSALS = {
    "400": "What was asked cannot be done; `param` names the field.",
    "401": "No API key, or a wrong one.",
    "404": "There is no such model, or nothing at this path.",
    "405": "The path does not take this method.",
    "408": "The body came too slowly.",
    "413": "The body is too big.",
    "415": "The body is not application/json.",
    "421": "The Host header names another server.",
    "429": "This key has too much under way; see Retry-After.",
    "431": "Too many headers.",
    "500": "The server failed; the message holds an id for its log.",
    "503": "Too much waits, or the server is ending; see Retry-After.",
    "504": "The request's time was over.",
}


@functools.cache
def openapi() -> dict[str, Any]:
    """Write the document (OpenAPI 3.1)."""
    _, definitions = models_json_schema(
        [(model, "validation") for model, _ in BODIES.values()],
        ref_template="#/components/schemas/{model}",
    )
    schemas = {**definitions.get("$defs", {}), "Error": ERROR}
    paths: dict[str, Any] = {}
    for path, (model, summary) in BODIES.items():
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        content: dict[str, Any] = {"application/json": {}}
        if path.startswith("/v1/"):
            content["text/event-stream"] = {}
        paths[path] = {
            "post": {
                "summary": summary,
                "operationId": model.__name__.removesuffix("Fields"),
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                },
                "responses": _responses(content),
            }
        }
    for path, (summary, content_type) in READS.items():
        get: dict[str, Any] = {"summary": summary, "responses": _responses({content_type: {}})}
        if "{name}" in path:
            get["parameters"] = [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        if path == "/dashboard/state":
            get["parameters"] = [{"name": "since", "in": "query", "schema": {"type": "number"}}]
        paths[path] = {"get": get}
    return {
        "openapi": "3.1.0",
        "info": {"title": "forerun", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _responses(content: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    told = {status: {"description": text, "content": error} for status, text in REFUSALS.items()}
    told["503"]["content"] = {"application/json": {}}  # /ready and /health say what they are
    return {"200": {"description": "As asked.", "content": content}, **told}
