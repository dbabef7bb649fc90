"""The ways by which a fetching worker gets at a source's pages. Each reaches a source and takes what it sends."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Protocol

from worker.transfer.addresses import Address, host_and_port
from worker.transfer.errors import TransferFailed
from worker.transfer.gate import Request
from worker.transfer.pages import Launch, PageMemory, Segment
from worker.transfer.wire import (
    STALL_S,
    Frame,
    checksum_of,
    open_with,
    receive_done,
    receive_head,
    receive_segments,
)

CONNECT_S = 2.0
"""Longest wait for a connection."""


class Taking(Protocol):
    """How the bytes of one fetch come."""

    checksum: int  # of all page bytes that came through the connection

    def take(self, segments: Sequence[Segment]) -> None:
        """Fill ``segments`` with the next group. Raises OSError, TransferFailed, WayUnusable."""
        ...


class Way(Protocol):
    """``scheme`` is that of the addresses it knows."""

    scheme: str

    def connect(self, address: Address) -> socket.socket:
        """Raises OSError, ValueError or WayUnusable."""
        ...

    def taking(self, connection: socket.socket) -> Taking: ...


def fetch(
    connection: socket.socket, way: Way, key: str, request: Request, memory: PageMemory, pages: Sequence[int],
    launch: Launch,
) -> None:  # fmt: skip
    """Bring what ``request`` asks for into ``pages`` of ``memory``; they hold it all when this returns.

    Raises TransferFailed, WayUnusable or OSError; nothing is written any more then either.
    """
    open_with(connection, key, request)
    taking = way.taking(connection)
    with contextlib.closing(memory.incoming(pages, launch)) as incoming:  # type: ignore[type-var]
        for segments in incoming:
            taking.take(segments)
    if receive_done(connection) != taking.checksum:
        raise TransferFailed("the checksum does not match")


class Tcp:
    """Bytes in the connection, straight from page memory and into it."""

    scheme = "tcp"

    def connect(self, address: Address) -> socket.socket:
        return connect(address)

    def taking(self, connection: socket.socket) -> Taking:
        return TakeInline(connection)


class TakeInline:
    """The other end of :class:`~worker.transfer.source.SendInline`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.checksum = 0

    def take(self, segments: Sequence[Segment]) -> None:
        size = receive_head(self._connection, Frame.PAGES)
        if size != sum(segment.nbytes for segment in segments):
            raise TransferFailed(f"the source sent {size} bytes for a group of pages")
        receive_segments(self._connection, segments)
        self.checksum = checksum_of(segments, self.checksum)


def connect(address: Address) -> socket.socket:
    """A connection to the host and port of ``address``. Raises OSError, ValueError."""
    connection = socket.create_connection(host_and_port(address.place), CONNECT_S)
    connection.settimeout(STALL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
