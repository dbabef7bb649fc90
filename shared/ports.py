"""Listening sockets: how they are made, and one wording for a port that cannot be listened on."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterable

BACKLOG = 2048
"""Connections that wait to be accepted: as many as may come while a gateway starts again."""


def taken(host: str, port: int, flag: str) -> str:
    return f"port {port} on {host} is taken; choose another with {flag}"


def listen_problem(host: str, port: int, error: OSError, flag: str) -> str:
    """What is wrong with ``port``, in one line; ``flag`` is the one that sets it."""
    if error.errno == errno.EADDRINUSE:
        return taken(host, port, flag)
    return f"cannot listen on port {port} of {host} ({flag}): {error.strerror or error}"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host``: a name or an address, or empty for all. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


async def accept_no_more(listening: Iterable[int]) -> None:
    """Before an asyncio server closes these descriptors: every connection that was accepted is one when this returns.

    In asyncio's own loop a turn lies between the two, and a server that is closed in it drops the connection.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, asyncio.SelectorEventLoop):
        for number in listening:
            loop.remove_reader(number)
        await asyncio.sleep(0)
