"""What children tell of how far they have come (shared.supervision.tell), by systemd's protocol.

Who sent a message is the kernel's word, not the message's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid (unix(7))
_MOST_BYTES = 4096


class Notices:
    """A datagram socket at ``path``. Make it on a running event loop, which reads it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the socket cannot be made."""
        self.path = path
        self._told: dict[int, str] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            path.unlink(missing_ok=True)
            self._socket.bind(str(path))
            os.chmod(path, 0o600)
        except OSError:
            self._socket.close()
            raise
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def told(self, pid: int) -> str:
        """The latest that process ``pid`` has told of itself, or nothing."""
        return self._told.get(pid, "")

    def forget(self, pid: int) -> None:
        """The process has ended: its number may be given to another."""
        self._told.pop(pid, None)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data, ancillary, _, _ = self._socket.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid = _CREDENTIALS.unpack(payload[: _CREDENTIALS.size])[0]
                    for line in data.decode("utf-8", "replace").splitlines():
                        if line.startswith("STATUS="):
                            self._told[pid] = line.removeprefix("STATUS=")
