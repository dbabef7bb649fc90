"""The listening sockets of a mesh on one machine: ``up`` owns them, so that a port stays while a process is replaced.

Whoever connects while no process accepts waits in the socket's queue. While two processes share an internal listener's
socket, for the moment of a replacement, either may answer.
"""

from __future__ import annotations

import errno
import socket

from shared.config import ConfigError
from shared.ports import listen, listen_problem
from shared.supervision import METRICS

CLIENTS = "http"


class PortTaken(ConfigError):
    """Somebody listens there."""


class Sockets:
    """By child and by the name under which the child inherits it."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, socket.socket]] = {}

    def listen(self, child: str, name: str, host: str, port: int, flag: str) -> int:
        """Bind one; returns its port. Raises :class:`PortTaken` or ConfigError, which name the port and its flag."""
        try:
            made = listen(host, port)
        except OSError as error:
            kind = PortTaken if error.errno == errno.EADDRINUSE else ConfigError
            raise kind(listen_problem(host, port, error, flag)) from None
        self._of.setdefault(child, {})[name] = made
        return int(made.getsockname()[1])

    def of(self, child: str) -> dict[str, socket.socket]:
        return self._of.get(child, {})

    def metrics_port(self, child: str) -> int:
        """0 if it has none here."""
        found = self.of(child).get(METRICS)
        return int(found.getsockname()[1]) if found is not None else 0

    def close(self) -> None:
        """From now on the ports live as long as the children that have them. May be called twice."""
        for sockets in self._of.values():
            for one in sockets.values():
                one.close()
        self._of.clear()
