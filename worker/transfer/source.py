"""The side that has the pages: listens, asks the gate, and sends. A thread for each connection; it only reads pages."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from worker.transfer.errors import TransferFailed, WayUnusable
from worker.transfer.gate import Gate, Request
from worker.transfer.pages import Launch, PageMemory, Segment
from worker.transfer.wire import STALL_S, Frame, checksum_of, receive_opening, send_done, send_frame, send_reason

log = logging.getLogger("headrace.worker.transfer")

MOST_CONNECTIONS = 64
"""At once; one more is closed unheard."""


class Sending(Protocol):
    """How the bytes of one request leave."""

    def begin(self) -> None:
        """Before the first group."""
        ...

    def send(self, segments: Sequence[Segment]) -> None:
        """A group; nobody reads ``segments`` any more once it returns. Raises OSError."""
        ...

    @property
    def checksum(self) -> int:
        """Of all page bytes that went through the connection."""
        ...


class SendInline:
    """In the connection itself."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.checksum = 0

    def begin(self) -> None: ...

    def send(self, segments: Sequence[Segment]) -> None:
        self.checksum = checksum_of(segments, self.checksum)
        send_frame(self._connection, Frame.PAGES, segments)


MakeSending = Callable[[socket.socket], Sending]
"""Raises WayUnusable where it can't be."""


class Source:
    """``ways`` maps the scheme of an address to how bytes leave; ``served(scheme, bytes, refusal)`` is told of each
    request, on the thread of its connection."""

    def __init__(
        self, pages: PageMemory, gate: Gate, key: str, launch: Launch, ways: Mapping[str, MakeSending],
        served: Callable[[str, int, str], None],
    ) -> None:  # fmt: skip
        self._pages = pages
        self._gate = gate
        self._key = key
        self._launch = launch
        self._ways = ways
        self._served = served
        self._listening: list[socket.socket] = []
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._fetching = 0  # connections that have shown the key
        self._closed = False
        self._idle_since = -math.inf

    def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Serve whoever connects to ``sockets``, which listen and are this source's from now on."""
        self._listening += sockets
        for listening in sockets:
            threading.Thread(target=self._accept, args=(listening,), name="transfer-listen", daemon=True).start()

    def idle_s(self) -> float:
        """How long nobody has fetched; 0 while somebody does, infinity if nobody ever has. From any thread."""
        with self._lock:
            return 0.0 if self._fetching else time.monotonic() - self._idle_since

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._connections:
                _shut(connection)
        for listening in self._listening:
            _shut(listening)  # wakes the thread that accepts
            listening.close()

    def _accept(self, listening: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listening.accept()
            except OSError:
                if self._closed:
                    return
                log.exception("cannot accept connections for KV blocks")
                time.sleep(1)  # out of descriptors, most likely
                continue
            with self._lock:
                welcome = not self._closed and len(self._connections) < MOST_CONNECTIONS
                if welcome:
                    self._connections.add(connection)
            if not welcome:
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="transfer-send", daemon=True).start()
            except RuntimeError:  # the process has as many threads as it may
                log.exception("cannot serve a connection for KV blocks")
                with self._lock:
                    self._connections.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(STALL_S)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = receive_opening(connection, self._key)
            if request is None:
                self._served("", 0, "a stranger")
                return
            with self._fetches():
                self._answer(connection, request)
        except OSError as error:
            log.debug("a transfer of KV blocks ended: %s", error)
        except Exception:  # the one that fetches hears that the connection has ended
            log.exception("a transfer of KV blocks failed")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    @contextlib.contextmanager
    def _fetches(self) -> Iterator[None]:
        with self._lock:
            self._fetching += 1
        try:
            yield
        finally:
            with self._lock:
                self._fetching -= 1
                self._idle_since = time.monotonic()

    def _answer(self, connection: socket.socket, request: Request) -> None:
        count = 0
        try:
            pages = self._gate.pages(request)
            way = self._ways.get(request.by)
            if way is None:
                raise WayUnusable(f"it sends nothing by {request.by!r}")
            self._check(request)
            sending = way(connection)
            sending.begin()
            with contextlib.closing(self._pages.outgoing(pages, self._launch)) as outgoing:  # type: ignore[type-var]
                for segments in outgoing:
                    self._check(request)
                    sending.send(segments)
            self._check(request)  # what was read before is what was asked for
            send_done(connection, sending.checksum)
            count = len(pages) * self._pages.page_bytes
        except (TransferFailed, ValueError, WayUnusable) as error:
            self._served(request.by, 0, str(error))
            send_reason(connection, Frame.UNUSABLE if isinstance(error, WayUnusable) else Frame.FAILED, str(error))
            return
        self._served(request.by, count, "")

    def _check(self, request: Request) -> None:
        if refusal := self._gate.refusal(request):
            raise TransferFailed(refusal)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
