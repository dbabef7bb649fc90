"""A gateway that another replaces at the same listening socket: what is open is served, nothing is cut."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_mesh import RunningGateway, running_gateway
from raw_http import BODY, closed, connected, post, read_answer

from gateway import http_protocol, service

STREAM = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 8, "ignore_eos": True, "stream": True}).encode()


@pytest.fixture
def gw(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningGateway]:
    """Its socket is held by another process as well, as the supervisor does."""
    held: list[socket.socket] = []
    listen = service.listen

    def shared(host: str, port: int) -> socket.socket:
        bound = listen(host, port)
        held.append(bound.dup())
        return bound

    monkeypatch.setattr("gateway_mesh.listen", shared)
    monkeypatch.setattr(http_protocol, "KEEP_ALIVE_S", 0.3)
    with running_gateway(tokenizer_folder) as running:
        yield running
    held[0].close()


def retire(gw: RunningGateway) -> None:
    """Return once the gateway accepts no connections: a new one stays in the socket's queue."""
    gw.retire()
    deadline = time.monotonic() + 10
    while True:
        with socket.create_connection(("127.0.0.1", gw.port), timeout=30) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            connection.settimeout(0.1)
            try:
                assert connection.recv(1)
            except TimeoutError:
                return
        assert time.monotonic() < deadline


def test_an_idle_connection_gets_one_more_answer_which_says_that_it_is_the_last(gw: RunningGateway) -> None:
    with connected(gw) as connection:
        connection.sendall(post(BODY))
        assert "connection" not in read_answer(connection)[1]
        gw.retire()
        connection.sendall(post(BODY))
        status, headers, _ = read_answer(connection)
        while "connection" not in headers:  # the word had not reached it yet
            connection.sendall(post(BODY))
            status, headers, _ = read_answer(connection)
        assert (status, headers["connection"]) == (200, "close")
        assert closed(connection)
    assert gw.join(10) and gw.error is None


def test_an_open_stream_is_served_to_its_end_and_so_is_the_next_request(gw: RunningGateway) -> None:
    gw.mesh.stepping = False
    with connected(gw) as connection:
        connection.sendall(post(STREAM))
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1)
        retire(gw)
        assert not gw.gateway.draining
        gw.mesh.stepping = True
        rest = b""
        while not rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = connection.recv(65536)
            assert part, rest
            rest += part
        assert b'"finish_reason":"length"' in rest
        # Its head had not said that the connection would close: so it does not, yet.
        connection.sendall(post(BODY))
        status, headers, _ = read_answer(connection)
        assert (status, headers["connection"]) == (200, "close")
        assert closed(connection)
    assert gw.join(10) and gw.error is None


def test_it_ends_once_idle_connections_have_been_idle_as_long_as_ever(gw: RunningGateway) -> None:
    with connected(gw) as connection:
        connection.sendall(post(BODY))
        assert read_answer(connection)[0] == 200
        retire(gw)
        assert closed(connection)
    assert gw.join(10) and gw.error is None


def test_what_is_open_when_its_grace_is_over_ends_with_an_error(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, retire_grace_s=0.2) as gw:
        gw.mesh.stepping = False
        with connected(gw) as connection:
            connection.sendall(post(STREAM))
            gw.until(lambda: bool(gw.mesh.submits))
            gw.retire()
            text = b""
            while part := connection.recv(65536):
                text += part
        assert b'"draining"' in text
        assert gw.join(10) and gw.error is None


def test_sigterm_still_drains_one_that_is_retired(gw: RunningGateway) -> None:
    gw.mesh.stepping = False
    with connected(gw) as connection:
        connection.sendall(post(STREAM))
        gw.until(lambda: bool(gw.mesh.submits))
        retire(gw)
        gw.stop()
        gw.until(lambda: gw.gateway.draining)
        gw.mesh.stepping = True
        text = b""
        while part := connection.recv(65536):
            text += part
    assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert gw.join(10) and gw.error is None
