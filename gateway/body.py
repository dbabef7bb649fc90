"""Reads a request's body: bounded while it arrives, then strict JSON whose root is an object.

A body is also bounded in what it makes of itself: eight megabytes of empty lists parse for a second, in which the
event loop serves nobody else.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from starlette.types import Receive, Scope

from gateway.errors import ApiError, invalid

MAX_NESTING = 128  # arrays and objects within one another
MAX_PARTS = 50_000  # arrays and objects, and again as many keys

_FORM = b"application/x-www-form-urlencoded"
_decoder = msgspec.json.Decoder()
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # possessive, and ends anywhere: linear on any input


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


async def timely_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """:func:`read_body`, or a 408 if it takes longer than ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            return await read_body(scope, receive, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {timeout_s:g} s", code="body_timeout") from None


def check_media_type(scope: Scope) -> None:
    """A 415 for a body that is said to be something else than JSON; one about which nothing is said may be JSON.

    A page in a browser can send forms and plain text to any address without asking; JSON it cannot.
    """
    for name, value in scope["headers"]:
        if name == b"content-type":
            media_type = value.split(b";")[0].strip().lower()
            if media_type != b"application/json":
                told = media_type.decode("latin-1")
                # curl's -d says so unless it is told otherwise
                hint = "; add -H 'Content-Type: application/json'" if media_type == _FORM else ""
                message = f"the body must be application/json, not {told:.80}{hint}"
                raise ApiError(415, message, code="unsupported_media_type")


def parse_json(body: bytes) -> dict[str, Any]:
    """The body's object. NaN, infinities, unpaired surrogates, bytes that are no UTF-8 and bombs are a 400."""
    nested = body.count(b"[") + body.count(b"{")  # strings count too: an upper bound, and nearly always small
    if nested > MAX_PARTS or body.count(b":") > MAX_PARTS:
        bare = _STRING.sub(b"", body)
        if max(bare.count(b"[") + bare.count(b"{"), bare.count(b":")) > MAX_PARTS:
            raise invalid(f"the body has more than {MAX_PARTS} arrays and objects, or keys")
    try:
        parsed = _decoder.decode(body)
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise invalid(f"the body is no valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise invalid("the body must be a JSON object")
    if nested > MAX_NESTING and _is_deeper(parsed, MAX_NESTING):
        raise invalid("the body is nested too deeply")
    return parsed


def _is_deeper(root: dict[str, Any] | list[Any], limit: int) -> bool:
    """Containers within containers beyond ``limit`` levels; level by level, since recursion is what is guarded."""
    level: list[dict[str, Any] | list[Any]] = [root]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes (--max-body-bytes)", code="body_too_large")
