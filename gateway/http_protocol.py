"""uvicorn's HTTP/1.1 protocol with limits that it lacks: on the size of a request's head, and on the time it takes.

It also serves requests that offer an upgrade: Java's default client sends ``Upgrade: h2c`` with every POST to a plain
address. A server may ignore that (RFC 9110, 7.8), but the parser takes the body behind it for another protocol.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class GatewayHttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0  # of the request whose head is being read
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_left = 0  # behind a head that offered an upgrade: the parser has left, we count
        self._upgrade_offered = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_read()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._body_left:
            data = self._take_body(data)
            if not data:
                return
        self._unset_keepalive_if_required()
        if self._head_timer is not None:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "this is no valid HTTP/1.1 request"))
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(ApiError(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes"))

    def on_message_begin(self) -> None:
        if self._head_timer is None:
            self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_is_read()
        self._upgrade_offered = self.parser.should_upgrade()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._upgrade_offered:  # else the parser stops before the body
            super().on_message_complete()

    def _ignore_upgrade(self, rest: bytes) -> None:
        self._upgrade_offered = False
        self.parser = httptools.HttpRequestParser(self)  # for what follows this request
        headers = dict(self.headers)
        if b"transfer-encoding" in headers:
            self._refuse(ApiError(400, "a chunked body together with an Upgrade header is not supported"))
            return
        length = headers.get(b"content-length", b"0")
        self._body_left = int(length) if length.isdigit() else 0
        if not self._body_left:
            super().on_message_complete()
        if rest:
            self.data_received(rest)

    def _take_body(self, data: bytes) -> bytes:
        """Give the request the part of ``data`` that is its body; returns the rest."""
        body, rest = data[: self._body_left], data[self._body_left :]
        self._body_left -= len(body)
        self.on_body(body)
        if not self._body_left:
            super().on_message_complete()
        return rest

    def _await_head(self) -> None:
        self._head_bytes = 0
        late = ApiError(408, f"no complete request came within {HEAD_TIMEOUT_S:g} s")
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, late)

    def _head_is_read(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer a request that never reached the application, and close."""
        self._head_is_read()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else an answer is under way: only close
            body = error.body()
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
                % (error.status, _REASONS[error.status], len(body), body)
            )
        self.transport.close()
