"""Reads a request's body: bounded while it arrives, then strict JSON whose root is an object."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Receive, Scope

from gateway.errors import ApiError, invalid

_decoder = msgspec.json.Decoder()


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body, or a 413 as soon as it is known to exceed ``max_bytes``."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def parse_json(body: bytes) -> dict[str, Any]:
    """The body's object. NaN, infinities, unpaired surrogates, bytes that are no UTF-8 and bombs are a 400."""
    try:
        parsed = _decoder.decode(body)
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise invalid(f"the body is no valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise invalid("the body must be a JSON object")
    return parsed


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
