"""The endpoints that tell: models, tokens, health, version, metrics, the dashboard's state."""

from __future__ import annotations

import math
import time
from typing import Any

from pydantic import StrictBool, StrictStr
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from .._version import __version__
from .body import read_fields
from .failures import Refusal
from .fields import Loose, Objects, ShortText, TokenIds
from .rendering import render_messages
from .service import Service, service_of

__all__ = [
    "DetokenizeFields",
    "TokenizeFields",
    "dashboard_state",
    "detokenize",
    "health",
    "metrics",
    "model",
    "models",
    "ready",
    "tokenize",
    "tokenizer_info",
    "version",
]


class TokenizeFields(Loose):
    """The body of /tokenize: a prompt, or messages for the model's template."""

    model: ShortText | None = None
    prompt: StrictStr | None = None
    messages: Objects | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    return_token_strs: StrictBool | None = None


class DetokenizeFields(Loose):
    """The body of /detokenize."""

    model: ShortText | None = None
    tokens: TokenIds


async def models(http: HttpRequest) -> Response:
    """GET /v1/models."""
    service = service_of(http)
    cards = [_card(service, name) for name in service.config.model_names]
    return JSONResponse({"object": "list", "data": cards})


async def model(http: HttpRequest) -> Response:
    """GET /v1/models/{id}; ids may hold slashes."""
    service = service_of(http)
    name = http.path_params["name"]
    service.check_model(name)
    return JSONResponse(_card(service, name))


async def tokenize(http: HttpRequest) -> Response:
    """POST /tokenize."""
    service = service_of(http)
    given = await read_fields(http, TokenizeFields)
    service.check_model(given.model)
    if (given.prompt is None) == (given.messages is None):
        raise Refusal(400, "send one of prompt and messages", param="prompt", code="invalid_value")

    def encode() -> list[int]:
        codec = service.engine.codec
        if given.messages is not None:
            return render_messages(
                codec,
                given.messages,
                seconds=service.config.template_timeout_s,
                starts_anew=given.add_generation_prompt is not False,
            )
        return codec.encode(given.prompt or "", add_special=given.add_special_tokens is not False)

    tokens = await service.prepare(http, encode)
    body: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": service.engine.max_model_len,
        "tokens": tokens,
    }
    if given.return_token_strs:
        body["token_strs"] = [service.token_texts.text(token) for token in tokens]
    return JSONResponse(body)


async def detokenize(http: HttpRequest) -> Response:
    """POST /detokenize."""
    service = service_of(http)
    given = await read_fields(http, DetokenizeFields)
    service.check_model(given.model)
    for place, token in enumerate(given.tokens):
        if not 0 <= token < service.engine.model_config.vocab_size:
            raise Refusal(
                400,
                f"tokens[{place}]={token} is outside the vocabulary (0 to "
                f"{service.engine.model_config.vocab_size - 1})",
                param="tokens",
                code="invalid_value",
            )
    codec = service.engine.codec
    text = await service.prepare(http, lambda: codec.decode(given.tokens, skip_special=False))
    return JSONResponse({"prompt": text})


async def tokenizer_info(http: HttpRequest) -> Response:
    """GET /tokenizer_info: what evaluation harnesses ask for."""
    service = service_of(http)
    codec = service.engine.codec
    return JSONResponse(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": codec.bos_token,
            "eos_token": codec.eos_token,
            "add_bos_token": codec.add_bos,
            "chat_template": codec.chat_source,
            "model_max_length": service.engine.max_model_len,
            "vocab_size": codec.vocab_size,
        }
    )


async def health(http: HttpRequest) -> Response:
    """GET /health: the process lives, and so does the engine's thread."""
    alive = service_of(http).engine.pulse().is_alive
    return JSONResponse({"status": "ok" if alive else "dead"}, status_code=200 if alive else 503)


async def ready(http: HttpRequest) -> Response:
    """GET /ready: requests are taken, and steps get done."""
    service = service_of(http)
    status = service.status
    pulse = service.engine.pulse()
    body = {
        "status": status,
        "step_running_s": round(pulse.since_beat_s, 3) if pulse.is_busy else None,
        "requests_under_way": service.generations.admission.num_under_way,
        "speculation": _speculation(service),
    }
    return JSONResponse(body, status_code=200 if status == "ready" else 503)


async def version(http: HttpRequest) -> Response:
    """GET /version."""
    return JSONResponse({"version": __version__})


async def metrics(http: HttpRequest) -> Response:
    """GET /metrics, for Prometheus."""
    service = service_of(http)
    service.metrics.set_load(*service.engine.load)  # steps tell it too, but not when none follows
    body, content_type = service.metrics.render_for(http.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


async def dashboard_state(http: HttpRequest) -> Response:
    """GET /dashboard/state: what the page shows, from `since` on."""
    service = service_of(http)
    since = http.query_params.get("since")
    try:
        since_s = None if since is None else float(since)
    except ValueError:
        since_s = math.nan
    if since_s is not None and not math.isfinite(since_s):
        raise Refusal(400, f"since={since!r:.80} is no number of seconds", param="since")
    machinery = service.engine.machinery
    return JSONResponse(
        {
            "model": service.config.model_name,
            "version": __version__,
            "drafter": service.method,
            "drafters": sorted({service.method, "none"}),
            "max_draft": service.max_draft,
            "uptime_s": round(time.monotonic() - service.started_s, 1),
            "status": service.status,
            "machine": service.machine,
            "max_model_len": machinery.max_model_len,
            "speculation": _speculation(service),
            **service.history.snapshot(since_s),
            "health": service.history.health(),
        }
    )


def _speculation(service: Service) -> dict[str, Any]:
    enabled = service.method != "none" and service.max_draft > 0
    return {"enabled": enabled, "reason": None if enabled else "no drafter is loaded"}


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "forerun",
        "root": service.config.model_name,
        "parent": None,
        "max_model_len": service.engine.max_model_len,
    }
