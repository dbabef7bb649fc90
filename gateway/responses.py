"""Raw ASGI responses, and what every response carries."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import Message, Receive, Scope, Send

from gateway.errors import ApiError
from gateway.writers import JSON
from shared.ids import new_request_id

Headers = Iterable[tuple[bytes, bytes]]

_ID_KEY = "headrace.request_id"
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


def client_request_id(scope: Scope) -> str | None:
    """The client's ``X-Request-Id`` if it is one that can be echoed and logged."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value.decode() if _CLIENT_ID.fullmatch(value) else None
    return None


def request_id(scope: Scope) -> str:
    """The client's id, else one of ours: settled once, so that answer, log and trace have the same."""
    found = scope.get(_ID_KEY)
    if not isinstance(found, str):
        found = scope[_ID_KEY] = client_request_id(scope) or new_request_id()
    return found


def id_header(scope: Scope) -> tuple[bytes, bytes]:
    return b"x-request-id", request_id(scope).encode()


def with_request_id(scope: Scope, send: Send) -> Send:
    """``send``, which gives an answer its request's id unless it has one."""

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            if all(name != b"x-request-id" for name, _ in headers):
                headers.append(id_header(scope))
            message = {**message, "headers": headers}
        await send(message)

    return send_with_id


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
    # 413: the rest of the body is not wanted. 500: the server closes behind a fault, and clients must not send on.
    closing = [(b"connection", b"close")] if error.status in (413, 500) else []
    await send_whole(send, error.status, error.body(), [*error.headers(), *closing, *headers])


class ErrorResponse:
    """An :class:`ApiError` as an ASGI response."""

    def __init__(self, error: ApiError) -> None:
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(send, self._error)
