"""How a child is given listening sockets: systemd's way, as descriptors from 3 on (see shared.supervision)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

from shared.supervision import FIRST_FD, LISTEN_VARIABLES, NOTIFY_VARIABLE

MOST_SOCKETS = 2


def environ_without_protocol(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what whoever started *us* meant for us alone."""
    return {name: value for name, value in environ.items() if name not in (*LISTEN_VARIABLES, NOTIFY_VARIABLE)}


def listen_environ(sockets: Mapping[str, socket.socket]) -> dict[str, str]:
    """What tells a child of its sockets. ``LISTEN_PID`` is left out: nobody knows it before the child runs."""
    return {"LISTEN_FDS": str(len(sockets)), "LISTEN_FDNAMES": ":".join(sockets)} if sockets else {}


def descriptors(sockets: Mapping[str, socket.socket]) -> range:
    """The numbers that the sockets have in the child: its ``pass_fds``."""
    if len(sockets) > MOST_SOCKETS:
        raise ValueError(f"no child has more than {MOST_SOCKETS} sockets")
    return range(FIRST_FD, FIRST_FD + len(sockets))


def placing(sockets: Mapping[str, socket.socket], then: Callable[[], None] | None) -> Callable[[], None] | None:
    """The ``preexec_fn`` that puts the sockets where the child expects them, and goes on with ``then``.

    The numbers are held here, too: were one free, ``subprocess`` could take it for the pipe by which it hears of the
    child's start.
    """
    if not sockets:
        return then
    while (held := os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)) < FIRST_FD + MOST_SOCKETS:
        pass
    os.close(held)
    numbers = [one.fileno() for one in sockets.values()]

    def preexec() -> None:
        copies = [os.dup(number) for number in numbers]  # a number may be a place of another
        for index, copy in enumerate(copies):
            os.dup2(copy, FIRST_FD + index)
        if then is not None:
            then()

    return preexec
