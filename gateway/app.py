"""The gateway's routes. Everything that answers a prompt is in :mod:`gateway.answering`; here is the rest."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.answering import AnswerApp
from gateway.endpoints import Chat, Completions, Generate
from gateway.errors import ApiError, unavailable
from gateway.gateway import Gateway
from gateway.openapi import document
from gateway.text_routes import Detokenize, TextApp, Tokenize
from shared.messages import Outcome


def make_app(gateway: Gateway) -> Starlette:
    """The ASGI application of ``gateway``."""
    started_s = int(time.time())

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        reason = gateway.why_not_ready()
        if reason is not None:
            outcome = Outcome.DRAINING if gateway.draining else Outcome.NO_WORKER
            return error_response(unavailable(reason, outcome.value))
        return JSONResponse({"status": "ready"})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": _version()})

    async def openapi(request: Request) -> Response:
        models = gateway.models
        info = gateway.dispatch.mesh.model(models.first.name, time.monotonic()) if len(models) == 1 else None
        empty_prompts = any(served.tokenizer.adds_special_tokens for served in models)
        return JSONResponse(document(gateway.config, info, _version(), gateway.keys.required, empty_prompts))

    def card(model: str, adapter: str = "") -> dict[str, Any]:
        """As vLLM has it: an adapter's root is a thing of its own, and its parent the model that it is for."""
        info = gateway.describe(model, adapter, time.monotonic())
        return {
            "id": adapter or model,
            "object": "model",
            "created": started_s,
            "owned_by": "headrace",
            "root": adapter or model,
            "parent": model if adapter else None,
            "max_model_len": info.max_model_len if info is not None else None,
        }

    async def models(request: Request) -> Response:
        cards = [card(model, adapter) for model, adapter in gateway.listed().values()]
        return JSONResponse({"object": "list", "data": cards})

    async def model(request: Request) -> Response:
        try:
            served, adapter = gateway.find(request.path_params["name"])
        except ApiError as error:
            return error_response(error)
        return JSONResponse(card(served.name, adapter))

    return Starlette(
        routes=[
            Route("/v1/completions", AnswerApp(gateway, Completions()), methods=["POST"]),
            Route("/v1/chat/completions", AnswerApp(gateway, Chat()), methods=["POST"]),
            Route("/generate", AnswerApp(gateway, Generate()), methods=["POST"]),
            Route("/tokenize", TextApp(gateway, Tokenize()), methods=["POST"]),
            Route("/detokenize", TextApp(gateway, Detokenize()), methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", model, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/ready", ready, methods=["GET"]),
            Route("/version", version, methods=["GET"]),
            Route("/openapi.json", openapi, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
    )


def error_response(error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return JSONResponse({"error": error.fields()}, error.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    url = f"{request.method} {request.url.path:.200}"
    message = {404: f"Invalid URL ({url})", 405: f"Invalid method for URL ({url})"}.get(error.status_code, error.detail)
    response = error_response(ApiError(error.status_code, message, code=_CODES.get(error.status_code)))
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    response = error_response(ApiError(500, "internal error", "server_error"))
    response.headers["connection"] = "close"  # as the server does behind a fault: clients must not send on
    return response


_CODES = {404: "not_found", 405: "method_not_allowed"}


def _version() -> str:
    try:
        return importlib.metadata.version("headrace")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
