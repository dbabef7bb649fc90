"""Between workers of one machine: whoever fetches copies straight out of the source's memory into its own pages.

The kernel copies once, from process to process (``process_vm_readv``, "cross memory attach" to MPI and UCX). A socket
beside it carries what is said. Where the kernel forbids it, or the source is on another machine, other ways are left.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence

from worker.transfer.addresses import Address
from worker.transfer.errors import TransferFailed, WayUnusable
from worker.transfer.pages import Segment
from worker.transfer.source import Sending
from worker.transfer.ways import CONNECT_S, Taking
from worker.transfer.wire import ACK, STALL_S, Frame, receive_body, receive_exactly, send_frame

MOST_PLACES_BYTES = 64 << 20

_PLACE = struct.Struct("!QQ")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_PR_SET_PTRACER = 0x59616D61
_MOST_PARTS = 512  # pieces in one call; the kernel takes 1024


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
_read = _libc.process_vm_readv
_read.restype = ctypes.c_ssize_t
_read.argtypes = [
    ctypes.c_int, ctypes.POINTER(_Vector), ctypes.c_ulong, ctypes.POINTER(_Vector), ctypes.c_ulong, ctypes.c_ulong,
]  # fmt: skip


class SendPlaces:
    """Says where the bytes of each group are, and waits until they were taken. Implements
    :class:`~worker.transfer.source.Sending`."""

    checksum = 0  # no byte of a page goes through the connection

    def __init__(self, connection: socket.socket, setup: bytes = b"") -> None:
        self._connection = connection
        self._setup = setup

    def begin(self) -> None:
        if self._setup:
            send_frame(self._connection, Frame.SETUP, head=self._setup)

    def send(self, segments: Sequence[Segment]) -> None:
        places = b"".join(_PLACE.pack(segment.ctypes.data, segment.nbytes) for segment in segments)
        send_frame(self._connection, Frame.PLACES, head=places)
        if receive_exactly(self._connection, len(ACK)) != ACK:
            raise ConnectionResetError("the other side does not follow")


def receive_places(connection: socket.socket) -> list[tuple[int, int]]:
    """(address, bytes) of each piece of a group, in the source's memory."""
    return list(_PLACE.iter_unpack(receive_body(connection, Frame.PLACES, MOST_PLACES_BYTES)))


def pieces(segments: Sequence[Segment], places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(address here, address there, bytes): both sides cut where either is. Raises TransferFailed if one is longer."""
    if sum(segment.nbytes for segment in segments) != sum(size for _, size in places):
        raise TransferFailed("the source names other amounts of bytes than it was asked for")
    there = iter(places)
    address, left = 0, 0
    for segment in segments:
        here, wanted = segment.ctypes.data, segment.nbytes
        while wanted:
            while not left:
                address, left = next(there)
            size = min(wanted, left)
            yield here, address, size
            here, address = here + size, address + size
            wanted, left = wanted - size, left - size


def listen() -> tuple[socket.socket, str]:
    """A socket that only this machine reaches, and its name. No file is left behind."""
    name = f"headrace-{os.getpid()}-{secrets.token_hex(4)}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind("\0" + name)
    listening.listen()
    return listening, name


def send_by_memory(connection: socket.socket) -> Sending:
    """Under Yama's restrictions whoever asks must be allowed to read this process; elsewhere that has no effect."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_peer(connection)), 0, 0, 0)
    return SendPlaces(connection)


class SharedMemory:
    """Implements :class:`~worker.transfer.ways.Way`."""

    scheme = "shm"

    def connect(self, address: Address) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(CONNECT_S)
            connection.connect("\0" + address.place)
            connection.settimeout(STALL_S)
        except OSError:
            connection.close()
            raise
        return connection

    def taking(self, connection: socket.socket) -> Taking:
        return _TakeFromMemory(connection, _peer(connection))


class _TakeFromMemory:
    checksum = 0

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._pid = pid

    def take(self, segments: Sequence[Segment]) -> None:
        if self._pid <= 0:
            raise WayUnusable("its process is in another namespace")
        parts = list(pieces(segments, receive_places(self._connection)))
        for first in range(0, len(parts), _MOST_PARTS):
            self._copy(parts[first : first + _MOST_PARTS])
        self._connection.sendall(ACK)

    def _copy(self, parts: Sequence[tuple[int, int, int]]) -> None:
        count = len(parts)
        here = (_Vector * count)(*(_Vector(address, size) for address, _, size in parts))
        there = (_Vector * count)(*(_Vector(address, size) for _, address, size in parts))
        copied = _read(self._pid, here, count, there, count, 0)
        if copied == sum(size for _, _, size in parts):
            return
        number = ctypes.get_errno() if copied < 0 else errno.EFAULT
        if number in (errno.EPERM, errno.ENOSYS):
            raise WayUnusable(f"the kernel lets no process read another's memory ({os.strerror(number)})")
        raise OSError(number, os.strerror(number))


def _peer(connection: socket.socket) -> int:
    """The process at the other end; 0 if this one's namespace does not know it."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[0])
