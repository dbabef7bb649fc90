"""The internal listener of a service: metrics, and pages for those who run the mesh. A port of its own, on loopback
unless told otherwise, so that API keys and clients never meet it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from shared.supervision import inherited_socket

log = logging.getLogger("headrace.listener")

disable_created_metrics()  # type: ignore[no-untyped-call]  # a fifth of the families, and nobody reads them

T = TypeVar("T")

ANSWER_TIMEOUT_S = 10.0
MOST_CONNECTIONS = 32  # at once; more are answered with 503

_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 21\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\ntoo many connections\n"
)


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    media_type: str = "text/html; charset=utf-8"
    status: int = 200


Handler = Callable[[str, Mapping[str, str]], Page]
"""Given what follows the route's prefix, and the query. Runs on a thread of its own (see :func:`on_loop`)."""


def on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T]) -> T:
    """Call ``function`` on the event loop from another thread, and wait: what a service owns is touched there only."""

    async def call() -> T:
        return function()

    return asyncio.run_coroutine_threadsafe(call(), loop).result(ANSWER_TIMEOUT_S)


class _Server(ThreadingHTTPServer):
    """A thread for each connection, of which there are never many: who runs a mesh has few eyes."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], inherited: socket.socket | None
    ) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, handler, bind_and_activate=inherited is None)
        if inherited is not None:
            self.socket.close()
            self.socket = inherited
            self.server_address = inherited.getsockname()
            self.server_port = self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.sendall(_TOO_MANY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):  # (those: the client has left)
            log.error("a connection failed", exc_info=error)


class InternalListener:
    """Serves ``/metrics`` of one registry, and what is added to it. Port 0 takes a free one.

    A socket that the process was started with (shared.supervision) takes the place of both host and port.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Raises OSError if the port cannot be had."""
        self._routes: list[tuple[str, Handler]] = []
        self._registry = registry
        listener = self

        class Answer(BaseHTTPRequestHandler):
            timeout = 30.0

            def do_GET(self) -> None:
                listener._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

            do_HEAD = do_GET

        self._server = _Server((host, port), Answer, inherited_socket(metrics=True))
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="internal-listener", daemon=True)
        self._thread.start()

    def add(self, prefix: str, handler: Handler) -> None:
        """Serve ``prefix`` and what is below it. The longest prefix wins."""
        self._routes = sorted([*self._routes, (prefix, handler)], key=lambda item: -len(item[0]))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        if url.path in ("/metrics", "/metrics/"):
            encode, media_type = choose_encoder(request.headers.get("Accept", ""))
            page = Page(encode(self._registry), media_type)
        else:
            page = self._routed(unquote(url.path), dict(parse_qsl(url.query)))
        request.send_response(page.status)
        request.send_header("Content-Type", page.media_type)
        request.send_header("Content-Length", str(len(page.body)))
        request.send_header("Cache-Control", "no-store")
        request.send_header("X-Content-Type-Options", "nosniff")
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(page.body)

    def _index(self) -> Page:
        """Links to all that is served."""
        paths = sorted(["/metrics", *(prefix for prefix, _ in self._routes)])
        links = "".join(f'<li><a href="{path}">{path}</a></li>' for path in paths)
        return Page(f"<!doctype html><title>Headrace</title><ul>{links}</ul>\n".encode())

    def _routed(self, path: str, query: Mapping[str, str]) -> Page:
        for prefix, handler in self._routes:
            if path == prefix or path.startswith(prefix.rstrip("/") + "/"):
                try:
                    return handler(path[len(prefix) :].strip("/"), query)
                except TimeoutError:
                    return Page(b"the service is busy\n", "text/plain", 503)
                except Exception:
                    log.exception("no answer for %s", prefix)
                    return Page(b"internal error\n", "text/plain", 500)
        if path in ("", "/"):
            return self._index()
        return Page(b"nothing here; / lists what there is\n", "text/plain", 404)
