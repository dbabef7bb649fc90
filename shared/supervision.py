"""What a process and whoever started it tell one another, as systemd does: listening sockets come inherited
(``LISTEN_FDS``), and how far the process has come goes out (``NOTIFY_SOCKET``).

``headrace up`` speaks both to its children, so that a replacement takes over the socket of the process it replaces.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping

FIRST_FD = 3
"""Where inherited sockets begin (sd_listen_fds)."""

METRICS = "metrics"
"""Name (``LISTEN_FDNAMES``, systemd's ``FileDescriptorName=``) of the socket of the internal listener. The first of
any other name is for clients."""

RETIRE = signal.SIGUSR1
"""Tells a gateway that another serves at its socket now: it ends once its connections have."""

LISTEN_VARIABLES = ("LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID")
NOTIFY_VARIABLE = "NOTIFY_SOCKET"

STARTED = "started"
SERVES = "serves"
STANDS_BY = "stands by"
LEADS = "leads"
"""How far a process has come (:func:`tell`). Started: by itself it is ready; it serves once the mesh knows it too."""


def inherited_socket(metrics: bool, environ: Mapping[str, str] | None = None) -> socket.socket | None:
    """The listening socket that this process was started with, or None; the caller owns it.

    It is non-blocking: another process may wait for connections at the same socket, and be quicker.
    """
    environ = os.environ if environ is None else environ
    if environ.get("LISTEN_PID", str(os.getpid())) != str(os.getpid()):
        return None  # meant for the process that started this one
    count = environ.get("LISTEN_FDS", "")
    if not count.isdecimal():
        return None
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    for index in range(int(count)):
        name = names[index] if index < len(names) else ""
        if (name == METRICS) is metrics:
            found = socket.socket(fileno=os.dup(FIRST_FD + index))  # a copy, which no child of this process inherits
            found.setblocking(False)
            return found
    return None


def tell(status: str, environ: Mapping[str, str] | None = None) -> None:
    """Tell whoever started this process, if they want to know, that it is up, and how far it has come."""
    address = (os.environ if environ is None else environ).get(NOTIFY_VARIABLE, "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    # Nobody may be there any more: nothing hangs on it here.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.setblocking(False)
        notify.sendto(f"READY=1\nSTATUS={status}\n".encode(), address)
