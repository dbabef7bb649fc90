"""Raw ASGI responses, and what every response carries."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError
from gateway.writers import JSON

Headers = Iterable[tuple[bytes, bytes]]

_CLIENT_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


def client_request_id(scope: Scope) -> str | None:
    """The client's ``X-Request-Id`` if it is one that can be echoed and logged."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value.decode() if _CLIENT_ID.fullmatch(value) else None
    return None


def header(scope: Scope, wanted: bytes) -> str:
    """A request header's value, or an empty string."""
    for name, value in scope["headers"]:
        if name == wanted:
            return str(value.decode("latin-1"))
    return ""


async def send_whole(send: Send, status: int, body: bytes, headers: Headers, media_type: bytes = JSON) -> None:
    start = [(b"content-type", media_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, headers: Headers = ()) -> None:
    closing = [(b"connection", b"close")] if error.status == 413 else []  # the rest of the body is not wanted
    await send_whole(send, error.status, error.body(), [*error.headers(), *closing, *headers])


class ErrorResponse:
    """An :class:`ApiError` as an ASGI response."""

    def __init__(self, error: ApiError) -> None:
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(send, self._error)
