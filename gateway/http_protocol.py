"""uvicorn's HTTP/1.1 protocol with the limits that it lacks, so that no client can hold or fill the process.

* *Heads* are bounded in size, number of fields, and time; so is the time between a connection's requests.
* *Connections* are bounded: one too many gets a 503 and is closed.
* *Answers* that come before the whole body: the rest of the body is read and thrown away for a while, since closing a
  socket with unread data resets it, and the client would see a broken pipe instead of its 413.
* *Readers* that do not take their answer are cut off.
* *Leavers* are noticed, those who had pipelined more requests too.
* A process that is *replaced* answers what still comes with ``Connection: close``. An idle connection is kept as long
  as ever, so that no client meets a closed one more often than it always may (RFC 9112, 9.6).

It also serves requests that offer an upgrade: Java's default client sends ``Upgrade: h2c`` with every POST to a plain
address. A server may ignore that (RFC 9110, 7.8), but the parser takes the body behind it for another protocol.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.errors import ApiError, unavailable

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
HEAD_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 75.0  # between two requests of a connection
MAX_PIPELINED = 16  # requests behind the one being answered; with more, reading pauses
MAX_DRAIN_BYTES = 32 << 20  # of a body that nobody wants any more
DRAIN_TIMEOUT_S = 5.0
HALF_CLOSED_S = 0.5  # how long an answer may still come once the client has closed its side
MAX_CONNECTIONS_REFUSED = 256  # at once, beyond the limit: they are told; more are just closed
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a service may set of the limits."""

    max_connections: int = 16384
    slow_reader_timeout_s: float = 120.0


def http_protocol(limits: HttpLimits) -> type[GatewayHttpProtocol]:
    """The protocol class for uvicorn, which hands no options through."""
    return type("LimitedHttpProtocol", (GatewayHttpProtocol,), {"limits": limits})


class _Flow(FlowControl):
    """Does not read on while many requests wait: uvicorn reads on behind each answer, and piles up what it reads."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if len(self._pipeline) <= MAX_PIPELINED:
            super().resume_reading()


class _Answers:
    """What a request's cycle sees of the transport. Closing is the protocol's: it knows what is still to be read."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class GatewayHttpProtocol(HttpToolsProtocol):
    limits = HttpLimits()
    retiring = False  # another process has taken over the listening socket; set for the class: all of its connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = KEEP_ALIVE_S  # type: ignore[assignment]  # uvicorn's is in whole seconds
        self._head_bytes = 0  # of the request whose head is being read
        self._in_head = False  # between a request's first byte, or the wait for it, and the end of its head
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_left = 0  # behind a head that offered an upgrade: the parser has left, we count
        self._upgrade_offered = False
        self._message_open = False  # a request was begun, and not all of it has come
        self._answering: RequestResponseCycle | None = None  # whose application runs; others wait in the pipeline
        self._closing = False  # nothing more is read of this client but to throw it away
        self._drain_bytes = 0  # thrown away so far
        self._drain_timer: asyncio.TimerHandle | None = None
        self._slow_timer: asyncio.TimerHandle | None = None
        self._hang_up_timer: asyncio.TimerHandle | None = None
        self._half_closed_timer: asyncio.TimerHandle | None = None

    # --- the connection -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        self._answers = _Answers(transport, self._close)
        self._await_head()
        over = len(self.connections) - self.limits.max_connections
        if over > MAX_CONNECTIONS_REFUSED:
            transport.abort()
        elif over > 0:
            message = f"more than {self.limits.max_connections} connections at once (--max-connections)"
            self._refuse(unavailable(message, "connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (
            self._head_timer, self._drain_timer, self._slow_timer, self._half_closed_timer, self._hang_up_timer
        ):  # fmt: skip
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        self._disconnect_all()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more. One that waits for an answer nevertheless gets it if it comes soon.

        Whether it still reads cannot be known; mostly it has left, and its work must not go on for long.
        """
        busy = self.cycle is not None and not self.cycle.response_complete
        if self._message_open or not busy or self.scheme == "https":  # TLS has no half-closed connections here
            return None
        self._half_closed_timer = self.loop.call_later(HALF_CLOSED_S, self._hang_up)
        self._closing = True
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._slow_timer is None:
            self._slow_timer = self.loop.call_later(self.limits.slow_reader_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None
        super().resume_writing()

    # --- requests in ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._drain_timer is not None:
            self._drain_bytes += len(data)
            if self._drain_bytes > MAX_DRAIN_BYTES:
                self._hang_up()
                return
        if self._closing:
            return
        if self._body_left:
            data = self._take_body(data)
            if not data:
                return
        self._unset_keepalive_if_required()
        idle = self.cycle is not None and self.cycle.response_complete
        if idle and not self._message_open and self._head_timer is None:
            self._await_head()  # line feeds between requests begin no message, and must not keep a connection
        if self._head_timer is not None:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "this is no valid HTTP/1.1 request"))
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        if self._closing:
            return
        self._unset_keepalive_if_required()
        if self._head_timer is None:
            self._await_head()
        self._message_open = self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_is_read()
        if self._closing:
            return
        head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > MAX_HEADERS or head_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
            return
        self._upgrade_offered = self.parser.should_upgrade()
        super().on_headers_complete()
        self.flow.resume_reading()  # uvicorn pauses behind the first one, and would not notice that the client leaves

    def on_body(self, body: bytes) -> None:
        if not self._closing:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._upgrade_offered:  # else the parser stops before the body
            self._complete_message()

    def _complete_message(self) -> None:
        self._message_open = False
        if self._closing:
            return
        super().on_message_complete()
        if self._drain_timer is not None:  # its answer has gone out before
            self._drain_timer.cancel()
            self._drain_timer = None
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _ignore_upgrade(self, rest: bytes) -> None:
        self._upgrade_offered = False
        if self._closing:
            return
        self.parser = httptools.HttpRequestParser(self)  # for what follows this request
        headers = dict(self.headers)
        if b"transfer-encoding" in headers:
            self._refuse(ApiError(400, "a chunked body together with an Upgrade header is not supported"))
            return
        length = headers.get(b"content-length", b"0")
        self._body_left = int(length) if length.isdigit() else 0
        if not self._body_left:
            self._complete_message()
        if rest:
            self.data_received(rest)

    def _take_body(self, data: bytes) -> bytes:
        """Give the request the part of ``data`` that is its body; returns the rest."""
        body, rest = data[: self._body_left], data[self._body_left :]
        self._body_left -= len(body)
        self.on_body(body)
        if not self._body_left:
            self._complete_message()
        return rest

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._head_bytes:
            self._refuse(ApiError(408, f"no complete request came within {HEAD_TIMEOUT_S:g} s"))
        else:
            self._hang_up()  # it has asked for nothing

    def _head_is_read(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # --- answers out ----------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.transport = self._answers  # type: ignore[assignment]
        self._answering = cycle
        self._say_close(cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        answered, self._answering = self._answering, None
        super().on_response_complete()
        if answered is self.cycle and self._message_open and not self._closing:
            self._unset_keepalive_if_required()
            self._drain()

    def _disconnect_all(self) -> None:
        """Tell every request of this connection that its client is gone; uvicorn tells only the latest."""
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in (self._answering, *waiting):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _refuse(self, error: ApiError) -> None:
        """Answer a request that never reached the application, and close."""
        self._head_is_read()
        if self._closing or self.transport.is_closing():
            return
        running = self._answering
        if running is None or not (running.response_started or self.pipeline):  # else only close: it is not its turn
            body = error.body()
            extra = b"".join(b"%b: %b\r\n" % header for header in error.headers())
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b"
                b"connection: close\r\n\r\n%s" % (error.status, _REASONS[error.status], len(body), extra, body)
            )
        self._disconnect_all()
        self._message_open = True  # whatever comes is thrown away
        self._close()

    def retire(self) -> None:
        """``retiring`` has been set: the answer that is being made is the last, if its head has not gone out yet."""
        if self._answering is not None:
            self._say_close(self._answering)

    def _say_close(self, cycle: RequestResponseCycle) -> None:
        if self.retiring and not cycle.response_started and not self.pipeline:
            cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        if not _has_unread(self.transport):  # else a request has come this very moment
            self._hang_up()

    def _close(self) -> None:
        """Close once the client has sent what it is sending, or has sent too much of it."""
        self.pipeline.clear()
        if not self._message_open or self.transport.is_closing():
            self._hang_up()
            return
        self._closing = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._drain()

    def _drain(self) -> None:
        """Read what is left of a body that nobody wants."""
        self._drain_bytes = 0
        self._drain_timer = self.loop.call_later(DRAIN_TIMEOUT_S, self._hang_up)
        self.flow.resume_reading()

    def _hang_up(self) -> None:
        """Close, for sure: what is written goes out first, but not to a client that never takes it."""
        self.transport.close()
        if self._hang_up_timer is None:
            self._hang_up_timer = self.loop.call_later(self.limits.slow_reader_timeout_s, self.transport.abort)


def _has_unread(transport: asyncio.Transport) -> bool:
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _head_too_large() -> ApiError:
    return ApiError(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} fields")
