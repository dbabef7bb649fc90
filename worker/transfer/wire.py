"""What is said on a connection between two workers of which one fetches pages.

The fetching side opens with MAGIC, the source's key and a request (msgpack). The source answers in frames: one for each
group of pages, then DONE if they were valid to the end. FAILED and UNUSABLE may come in place of any, and are the last.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from enum import IntEnum

import msgspec

from worker.transfer.errors import TransferFailed, WayUnusable
from worker.transfer.gate import Request
from worker.transfer.pages import Segment

MAGIC = b"HRKV\x01\n"  # its fifth byte is the version: others are strangers

KEY_BYTES = 32
"""Of a key, as ASCII."""

MOST_REQUEST_BYTES = 16 << 20
MOST_REASON_BYTES = 2000

STALL_S = 5.0
"""Longest wait for the other side to take or send a byte."""

_MOST_PARTS = 512
"""Pieces of memory in one call; the kernel takes 1024."""

_HEAD = struct.Struct("!BQ")
_LENGTH = struct.Struct("!I")
_CHECKSUM = struct.Struct("!I")
_requests = msgspec.msgpack.Decoder(Request)


class Frame(IntEnum):
    PAGES = 1  # the bytes of a group
    PLACES = 2  # where in the source's memory a group's bytes are: the fetching side gets them, then sends ACK
    SETUP = 3  # what the fetching side needs to know before the first of those
    DONE = 4  # the checksum of all bytes that came in PAGES
    FAILED = 5  # why
    UNUSABLE = 6  # why this way does not work there; another may


ACK = b"\x06"


def checksum_of(segments: Sequence[Segment], before: int = 0) -> int:
    """CRC-32 of their bytes, after bytes whose checksum is ``before``."""
    for segment in segments:
        before = zlib.crc32(segment.data, before)
    return before


def open_with(connection: socket.socket, key: str, request: Request) -> None:
    body = msgspec.msgpack.encode(request)
    connection.sendall(MAGIC + key.encode() + _LENGTH.pack(len(body)) + body)


def receive_opening(connection: socket.socket, key: str) -> Request | None:
    """The request, once whoever connects has shown the key; None for a stranger. Raises OSError.

    The key comes within STALL_S: whoever says it byte by byte holds nobody's place.
    """
    head = receive_exactly(connection, len(MAGIC) + KEY_BYTES + _LENGTH.size, time.monotonic() + STALL_S)
    connection.settimeout(STALL_S)
    shown = head[len(MAGIC) : len(MAGIC) + KEY_BYTES]
    if not hmac.compare_digest(shown, key.encode()) or not head.startswith(MAGIC):
        return None
    (length,) = _LENGTH.unpack_from(head, len(MAGIC) + KEY_BYTES)
    if length > MOST_REQUEST_BYTES:
        return None
    try:
        return _requests.decode(receive_exactly(connection, length))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def send_frame(connection: socket.socket, kind: Frame, segments: Sequence[Segment] = (), head: bytes = b"") -> None:
    """``head``, then the bytes of ``segments``, straight from where they are."""
    size = len(head) + sum(segment.nbytes for segment in segments)
    connection.sendall(_HEAD.pack(kind, size) + head)
    _send_segments(connection, segments)


def send_done(connection: socket.socket, checksum: int) -> None:
    send_frame(connection, Frame.DONE, head=_CHECKSUM.pack(checksum))


def send_reason(connection: socket.socket, kind: Frame, reason: str) -> None:
    """``kind`` is FAILED or UNUSABLE."""
    send_frame(connection, kind, head=reason.encode()[:MOST_REASON_BYTES])


def receive_head(connection: socket.socket, wanted: Frame) -> int:
    """How many bytes of a frame of the kind ``wanted`` follow.

    Raises TransferFailed if it is another, WayUnusable if it says so, OSError.
    """
    kind, size = _HEAD.unpack(receive_exactly(connection, _HEAD.size))
    if kind in (Frame.FAILED, Frame.UNUSABLE) and size <= MOST_REASON_BYTES:
        reason = receive_exactly(connection, size).decode("utf-8", "replace")
        raise TransferFailed(reason) if kind == Frame.FAILED else WayUnusable(reason)
    if kind != wanted:
        raise TransferFailed(f"the source sent a frame of kind {kind} in place of {wanted.name}")
    return int(size)


def receive_body(connection: socket.socket, wanted: Frame, most: int) -> bytes:
    """A whole frame of at most ``most`` bytes. Raises as :func:`receive_head`."""
    size = receive_head(connection, wanted)
    if size > most:
        raise TransferFailed(f"the source sent a frame {wanted.name} of {size} bytes")
    return receive_exactly(connection, size)


def receive_done(connection: socket.socket) -> int:
    """The checksum. Raises as :func:`receive_head`."""
    body = receive_body(connection, Frame.DONE, _CHECKSUM.size)
    if len(body) != _CHECKSUM.size:
        raise TransferFailed("the source sent no checksum")
    return int(_CHECKSUM.unpack(body)[0])


def receive_exactly(connection: socket.socket, count: int, until: float | None = None) -> bytes:
    """Raises OSError, among others when the connection ends before, or it is ``until`` (monotonic s)."""
    received = bytearray()
    while len(received) < count:
        if until is not None:
            connection.settimeout(max(0.001, until - time.monotonic()))
        part = connection.recv(min(count - len(received), 1 << 16))
        if not part:
            raise ConnectionResetError("the connection ended")
        received += part
    return bytes(received)


def receive_segments(connection: socket.socket, segments: Sequence[Segment]) -> None:
    """Fill ``segments``, straight from the socket. Raises OSError."""
    left = _Left(segments)
    while parts := left.parts():
        count = connection.recvmsg_into(parts)[0]
        if not count:
            raise ConnectionResetError("the connection ended")
        left.advance(count)


def _send_segments(connection: socket.socket, segments: Sequence[Segment]) -> None:
    left = _Left(segments)
    while parts := left.parts():
        left.advance(connection.sendmsg(parts))


class _Left:
    """What is left of some segments while their bytes come or go."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = list(segments)
        self._next = 0

    def parts(self) -> list[memoryview]:
        return [segment.data for segment in self._segments[self._next : self._next + _MOST_PARTS]]

    def advance(self, count: int) -> None:
        while count:
            segment = self._segments[self._next]
            if count < segment.nbytes:
                self._segments[self._next] = segment[count:]
                return
            count -= segment.nbytes
            self._next += 1
