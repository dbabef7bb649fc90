"""The OpenAPI 3.1 document of every route, for ``GET /openapi.json``."""

from __future__ import annotations

from typing import Any

from gateway.chat_schemas import Schema
from gateway.config import GatewayConfig
from gateway.request_schemas import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    GENERATE,
    TOKENIZE,
    TOKENIZE_CHAT,
    body_schema,
    fields,
)  # fmt: skip
from gateway.response_schemas import SCHEMAS, ref
from shared.messages import ModelInfo
from shared.pool_name import POOL_NAME

_ERRORS = {
    400: "the body, a field, or a length is not acceptable",
    401: "no API key, or none that is valid",
    404: "another model",
    405: "another method",
    408: "the request did not come in time",
    413: "the body is too large",
    415: "the body is no JSON",
    429: "too many requests, or the queue is full",
    431: "the head is too large",
    500: "an error of ours",
    503: "no worker or scheduler, or an interruption",
    504: "the answer could not be, or was not, complete in time",
}
_ALWAYS = (400, 401, 405, 408, 431, 500)  # any request may end so, before a route sees it
_BODY = (*_ALWAYS, 404, 413, 415, 429, 503)
_SECONDS = "^(|0{0,4}[1-9][0-9]{0,4}([.][0-9]{1,9})?|0{1,9}[.][0-9]{0,7}[1-9])$"  # empty: as if it were absent
_POOL = f"^({POOL_NAME})?$"
_KEY = "^[!-~]{1,255}$"
_EVENT_ID = "^([0-9a-f]{16}-[0-9]{1,11}-[0-9]{1,10}([.][0-9]{1,10}){1,128})?$"  # only those that were sent are taken
_RETRY_LATER = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "seconds"}}
_REQUEST_ID = {"X-Request-Id": {"schema": {"type": "string"}, "description": "the client's, or ours"}}

# Of each event of a stream, not of the stream: what a schema of ``text/event-stream`` means before OpenAPI 3.2.
_EVENT: Schema = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "id": {"type": "string"}, "event": {"const": "message"}},
    "required": ["data"],
}

# path -> (endpoint, summary, media type of a stream or none, schema of the answer)
_POSTS = {
    "/v1/completions": (COMPLETIONS, "Complete texts", "text/event-stream", "Completion"),
    "/v1/chat/completions": (CHAT, "Answer a conversation", "text/event-stream", "ChatCompletion"),
    "/generate": (GENERATE, "Complete a text (vLLM's plain server)", "application/x-ndjson", "Generated"),
    "/tokenize": (TOKENIZE, "Token ids of a text or a conversation", "", "Tokens"),
    "/detokenize": (DETOKENIZE, "Text of token ids", "", "Detokenized"),
}
# path -> (summary, schema of the answer, statuses beside 200 and those of every route)
_GETS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "/v1/models": ("The models that are served, and their adapters", "Models", ()),
    "/v1/models/{name}": ("A model, or an adapter", "Model", (404,)),
    "/health": ("Whether the process serves HTTP", "Health", ()),
    "/ready": ("Whether a completion can succeed", "Readiness", (503,)),
    "/version": ("The version of the server", "Version", ()),
    "/openapi.json": ("This document", "Document", ()),
}


def document(
    config: GatewayConfig, model: ModelInfo | None, version: str, keys_required: bool, empty_prompts: bool = True
) -> dict[str, Any]:
    """``model``: as the mesh describes it now, from which some limits come; None while no scheduler is heard.

    ``empty_prompts``: an empty text is a prompt, since the tokenizer adds a token to it.
    """
    table = fields(config, model, empty_prompts)
    bodies = {f"{endpoint.capitalize()}Request": body_schema(endpoint, table) for endpoint, *_ in _POSTS.values()}
    of_text, of_chat = (body_schema(form, table) for form in (TOKENIZE, TOKENIZE_CHAT))
    bodies["TokenizeRequest"] = {"anyOf": [of_text, of_chat]}
    paths: dict[str, Any] = {path: {"post": _post(*spec)} for path, spec in _POSTS.items()}
    for path, (summary, schema, statuses) in _GETS.items():
        paths[path] = {"get": _get(path, summary, schema, statuses)}
    components: dict[str, Any] = {"schemas": SCHEMAS | bodies}
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": components,
    }
    if keys_required:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"key": []}]
        paths["/health"]["get"]["security"] = []
    return whole


def _post(endpoint: str, summary: str, stream: str, answer: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": ref(answer)}}
    if stream:
        content[stream] = {"schema": _EVENT if stream == "text/event-stream" else {"type": "string"}}
    statuses = (*_BODY, 504) if stream else _BODY
    operation: dict[str, Any] = {
        "operationId": endpoint,
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": ref(f"{endpoint.capitalize()}Request")}},
        },
        "responses": {"200": {"description": "the answer", "headers": _REQUEST_ID, "content": content}}
        | _errors(statuses),
    }
    if stream:
        operation["parameters"] = [
            _header("X-Request-Timeout", _SECONDS, "seconds until the answer must be complete"),
            _header("X-Headrace-Pool", _POOL, "the pool of workers to run in; without it, by its length"),
            _header("Idempotency-Key", _KEY, "the same body with the same key has the same answer"),
        ]
    if stream == "text/event-stream":
        told = "id of the last event that was seen of this answer's stream, which then goes on behind it"
        operation["parameters"].append(_header("Last-Event-ID", _EVENT_ID, told))
    return operation


def _header(name: str, pattern: str, description: str) -> dict[str, Any]:
    schema: Schema = {"type": "string", "pattern": pattern}
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": description}


def _get(path: str, summary: str, answer: str, statuses: tuple[int, ...]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": path.strip("/").replace("/{name}", "_one").replace("/", "_").replace(".", "_"),
        "summary": summary,
        "responses": {"200": {"description": "the answer", "content": {"application/json": {"schema": ref(answer)}}}}
        | _errors((*_ALWAYS, *statuses)),
    }
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _errors(statuses: tuple[int, ...]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status in sorted(statuses):
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": ref("Error")}},
        }
        if status in (429, 503):
            responses[str(status)]["headers"] = _RETRY_LATER
    return responses
