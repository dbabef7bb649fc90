"""The door: with API keys in force every route but ``/health`` needs one, and a request carries what its key allows."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import UNAUTHORIZED, ApiError
from gateway.keys import ApiKey, Keyring
from gateway.limits import Allowance, Allowances
from gateway.responses import id_header, send_error

OPEN_PATHS = frozenset({"/health"})
"""Liveness only: a probe has no key. Metrics are on a listener of their own."""

_SCOPE_KEY = "headrace.access"


class Access:
    """What one request may do. Without a key (none is in force): anything, as nobody's tenant."""

    def __init__(self, key: ApiKey | None = None, allowance: Allowance | None = None) -> None:
        self._key = key
        self._allowance = allowance
        self._entered = False
        self._charged = 0
        self.counted = False  # by the gateway, among the requests that it works on

    @property
    def key_id(self) -> str:
        return self._key.id if self._key is not None else ""

    @property
    def tenant(self) -> str:
        """From the key only: no field of a request chooses whose share it uses."""
        return self._key.tenant if self._key is not None else ""

    @property
    def weight(self) -> int:
        return self._key.weight if self._key is not None else 100

    def priority(self, asked: int | None) -> int:
        return self._key.priority_of(asked) if self._key is not None else asked or 0

    def salt(self, asked: str) -> str:
        """Of the prefix cache: what one tenant has cached must not show in the times of another."""
        return f"{self.tenant}\0{asked}" if self.tenant else asked

    def enter(self) -> None:
        """Count the request; a 429 if its key may have no more of them now."""
        if self._allowance is not None:
            self._allowance.enter(time.monotonic())
            self._entered = True

    def charge(self, tokens: int) -> None:
        """Take the most tokens that the request can use; a 429 if its key has not got them now."""
        if self._allowance is not None:
            self._allowance.charge(tokens, time.monotonic())
            self._charged = tokens

    def leave(self, used_tokens: int) -> None:
        """The request has ended; what it was charged for and did not use is given back. Idempotent."""
        if self._allowance is None or not self._entered:
            return
        self._entered = False
        self._allowance.leave()
        self._allowance.refund(max(0, self._charged - used_tokens), time.monotonic())

    def headers(self) -> list[tuple[bytes, bytes]]:
        return self._allowance.headers(time.monotonic()) if self._allowance is not None else []


def access_of(scope: Scope) -> Access:
    """What the request of ``scope`` may do."""
    access = scope.get(_SCOPE_KEY)
    return access if isinstance(access, Access) else Access()


class KeyGate:
    """ASGI middleware around the whole application. ``on_refused`` is called for each 401."""

    def __init__(self, app: ASGIApp, keys: Keyring, on_refused: Callable[[], None] = lambda: None) -> None:
        self._app = app
        self._keys = keys
        self._on_refused = on_refused
        self._allowances = Allowances(time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys.required and scope["path"] not in OPEN_PATHS:
            presented = _presented(scope)
            key = self._keys.find(presented)
            if key is None:
                self._on_refused()
                headers = [(b"www-authenticate", b"Bearer"), id_header(scope)]
                await send_error(send, _unauthorized(bool(presented)), headers)
                return
            scope[_SCOPE_KEY] = Access(key, self._allowances.of(key.id, key))
        await self._app(scope, receive, send)


def _presented(scope: Scope) -> str:
    """The key in ``Authorization: Bearer KEY``, else in ``x-api-key``; empty if there is none."""
    other = ""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer" and key.strip():
                return str(key.strip())
        elif name == b"x-api-key":
            other = value.decode("latin-1").strip()
    return other


def _unauthorized(presented: bool) -> ApiError:
    """OpenAI's answer. It never quotes what was presented."""
    if presented:
        return ApiError(401, "the API key is not valid", code="invalid_api_key", outcome=UNAUTHORIZED)
    message = "no API key was given; send it as 'Authorization: Bearer KEY'"
    return ApiError(401, message, code="missing_api_key", outcome=UNAUTHORIZED)
