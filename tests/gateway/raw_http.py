"""HTTP by hand, for what no client library would send."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

from gateway_mesh import RunningGateway

BODY = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 3}).encode()


@contextlib.contextmanager
def connected(gw: RunningGateway) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", gw.port), timeout=30) as connection:
        yield connection


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, b"Host: x", b"Content-Length: %d" % len(body), *headers, b"", b""]
    return b"\r\n".join(lines) + body


def answer(connection: socket.socket) -> tuple[int, Any]:
    """One response with a content-length: (status, JSON body)."""
    status, _, body = read_answer(connection)
    return status, body


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], Any]:
    """One response with a content-length: (status, headers in lower case, JSON body)."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        assert part, f"closed after {data!r}"
        data += part
    head, body = data.split(b"\r\n\r\n", 1)
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return int(status_line.split()[1]), headers, json.loads(body)


def closed(connection: socket.socket) -> bool:
    """Wait until the other side has closed; False if it sends something instead."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
