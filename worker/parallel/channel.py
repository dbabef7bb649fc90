"""What the ranks of a worker tell one another, and the socket pair that it goes through: a length, then msgpack.

It has nothing to do with the collectives: a message waits for no rank's pass, and none waits for a message.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any

import msgspec

from shared.messages import StepPlan

_LENGTH = struct.Struct("!I")


class Setup(msgspec.Struct, array_like=True, tag="setup"):
    """The first message to a follower."""

    rank: int
    size: int
    store_port: int  # of the store on 127.0.0.1 through which the ranks find one another
    config: dict[str, Any]  # the fields of a WorkerConfig


class Blocks(msgspec.Struct, array_like=True, tag="blocks"):
    """To rank 0: how many KV blocks fit on this rank's device. To a follower: how many all of them use."""

    count: int


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """To rank 0: this rank has loaded. To a follower: all have; steps follow."""


class Outcome(msgspec.Struct, array_like=True):
    """What a step came to, on rank 0."""

    epoch: int
    step: int
    tokens: list[int]  # as in a StepResult
    candidates: list[tuple[int, list[int]]]  # of beams: (slot, its best continuations)
    failed: list[int]  # slots whose grammar failed


class Order(msgspec.Struct, array_like=True, tag="order"):
    """To a follower: run this plan."""

    plan: StepPlan
    skipped: list[int]  # slots of its rows whose sequences rank 0 knew to have ended: they have no row
    outcomes: list[Outcome]  # of the steps that rank 0 has settled since the last order


class Clear(msgspec.Struct, array_like=True, tag="clear"):
    """To a follower: forget every slot, as at a reset."""


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """To rank 0, a follower's last word. ``startup``: the worker can't start as it is configured."""

    reason: str
    startup: bool


Message = Setup | Blocks | Ready | Order | Clear | Failed

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Channel:
    """One end of a socket pair. Any thread may send; one receives."""

    def __init__(self, end: socket.socket, send_timeout_s: float) -> None:
        self._socket = end
        self._sending = threading.Lock()
        seconds, rest = divmod(send_timeout_s, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))

    def send(self, message: Message) -> None:
        """Raises OSError if nobody is there any more, or reads nothing for too long."""
        body = msgspec.msgpack.encode(message)
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Message | None:
        """The next message, however long it takes; None once the other end is gone."""
        head = self._read(_LENGTH.size)
        body = self._read(_LENGTH.unpack(head)[0]) if head is not None else None
        return _decoder.decode(body) if body is not None else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives
        self._socket.close()

    def _read(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._socket.recv(count - len(parts))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)
